/* Run-time dispatch: what this CPU can do, and the switch by which tests take every path in turn. */
#include "paths.h"
#include "kernels.h"

#include <string.h>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define AG_HWCAP_CRC32 (1UL << 7)
#endif

#if defined(__x86_64__)
static const char *const names[] = {"baseline", "sse4.2", "avx2"};
#else
static const char *const names[] = {"baseline", "crc", "avx2"};
#endif

static _Atomic int chosen = -1;

static enum ag_level best(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("sse4.2"))
        return AG_AVX2;
    return __builtin_cpu_supports("sse4.2") ? AG_CRC : AG_BASELINE;
#elif defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) & AG_HWCAP_CRC32 ? AG_CRC : AG_BASELINE;
#else
    return AG_BASELINE;
#endif
}

enum ag_level ag_level(void)
{
    int level = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (level < 0) {
        level = best();
        atomic_store_explicit(&chosen, level, memory_order_relaxed);
    }
    return (enum ag_level)level;
}

int32_t ag_force_path(const char *name)
{
    int top = best();
    if (name == NULL || name[0] == '\0') {
        atomic_store_explicit(&chosen, top, memory_order_relaxed);
        return AG_OK;
    }
    for (int level = 0; level <= top; level++) {
        if (strcmp(name, names[level]) == 0) {
            atomic_store_explicit(&chosen, level, memory_order_relaxed);
            return AG_OK;
        }
    }
    return AG_BAD;
}

const char *ag_path(void)
{
    return names[ag_level()];
}

int32_t ag_abi(void)
{
    return ARGOSY_ABI;
}
