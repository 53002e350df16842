/* Words in memory that processes share: store and wake, wait with peers and a deadline, compare-and-swap.
 *
 * A wait first spins, then sleeps on the word itself: the kernel compares the word with what was last seen before it sleeps, so a store that
 * comes in between is never missed. Sleeps are short slices, because the end of a peer and the broken word do not wake anybody.
 */
#define _GNU_SOURCE
#include "kernels.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MILLISECOND INT64_C(1000000)
#define SECOND INT64_C(1000000000)

/* The first slice is short: whoever waits for a process that was already gone learns it at once. */
enum { FIRST_SLICE_MILLISECONDS = 5, LONGEST_SLICE_MILLISECONDS = 50, PAUSES_PER_LOOK = 32, POLLED_AT_ONCE = 64 };

_Static_assert(sizeof(_Atomic uint32_t) == 4 && sizeof(_Atomic uint64_t) == 8, "words are plain memory");

int64_t ag_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SECOND + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static int has_reached(_Atomic uint32_t *word, uint32_t wanted, uint32_t *seen)
{
    *seen = atomic_load_explicit(word, memory_order_acquire);
    return (int32_t)(*seen - wanted) >= 0;
}

static int is_broken(const ag_peers *peers)
{
    return peers != NULL && peers->broken != NULL && atomic_load_explicit(peers->broken, memory_order_acquire) != 0;
}

/* AG_OK while all peers live. A descriptor that is none is AG_BAD: watching nobody would look like watching. */
static int32_t look_at(ag_peers *peers)
{
    struct pollfd polled[POLLED_AT_ONCE];
    uint32_t count = (uint32_t)peers->count;
    for (uint32_t first = 0; first < count; first += POLLED_AT_ONCE) {
        uint32_t n = count - first < POLLED_AT_ONCE ? count - first : POLLED_AT_ONCE;
        for (uint32_t i = 0; i < n; i++)
            polled[i] = (struct pollfd){.fd = peers->pidfds[first + i], .events = POLLIN};
        if (poll(polled, n, 0) <= 0)
            continue; /* nobody has ended, or a signal came: the next slice asks again */
        for (uint32_t i = 0; i < n; i++) {
            if (polled[i].revents == 0)
                continue;
            peers->lost = (int32_t)(first + i);
            return polled[i].revents & POLLNVAL ? AG_BAD : AG_PEER_LOST;
        }
    }
    return AG_OK;
}

static int spin(_Atomic uint32_t *word, uint32_t wanted, int64_t spin_ns, const ag_peers *peers)
{
    uint32_t seen;
    if (spin_ns <= 0)
        return has_reached(word, wanted, &seen);
    int64_t end = ag_now() + spin_ns;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            if (has_reached(word, wanted, &seen))
                return 1;
            relax();
        }
    } while (ag_now() < end && !is_broken(peers));
    return 0;
}

static void sleep_on(_Atomic uint32_t *word, uint32_t seen, int64_t slice_ns)
{
    struct timespec slice = {.tv_sec = slice_ns / SECOND, .tv_nsec = slice_ns % SECOND};
    /* Not FUTEX_PRIVATE: the waiter and the poster are different processes. A signal, a changed word and the end of the slice are all the
     * same to the caller, who looks again. */
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
}

/* What may end a wait other than the word; the word is asked last, since a peer may have posted and then ended. */
static int32_t reason_to_give_up(_Atomic uint32_t *word, uint32_t wanted, ag_peers *peers, int64_t deadline_ns)
{
    uint32_t seen;
    int32_t status = AG_OK;
    if (is_broken(peers))
        status = AG_BROKEN;
    else if (peers != NULL)
        status = look_at(peers);
    if (status == AG_OK && ag_now() >= deadline_ns)
        status = AG_TIMEOUT;
    if (status != AG_OK && has_reached(word, wanted, &seen)) {
        if (peers != NULL)
            peers->lost = -1;
        return AG_OK;
    }
    return status;
}

int32_t ag_wait(_Atomic uint32_t *word, uint32_t wanted, int64_t spin_ns, ag_peers *peers, int64_t deadline_ns)
{
    if (word == NULL || (uintptr_t)word % sizeof(uint32_t) != 0 || (peers != NULL && (peers->count < 0 || (peers->count > 0 && peers->pidfds == NULL))))
        return AG_BAD;
    if (peers != NULL)
        peers->lost = -1;
    if (spin(word, wanted, spin_ns, peers))
        return AG_OK;
    int64_t slice = FIRST_SLICE_MILLISECONDS * MILLISECOND;
    uint32_t seen;
    while (!has_reached(word, wanted, &seen)) {
        int64_t left = deadline_ns - ag_now();
        if (left > 0 && !is_broken(peers))
            sleep_on(word, seen, left < slice ? left : slice);
        if (has_reached(word, wanted, &seen))
            return AG_OK;
        int32_t status = reason_to_give_up(word, wanted, peers, deadline_ns);
        if (status != AG_OK)
            return status;
        slice = LONGEST_SLICE_MILLISECONDS * MILLISECOND;
    }
    return AG_OK;
}

void ag_wake(_Atomic uint32_t *word)
{
    /* The waiter may have registered after our store was made but before it is seen: the fence orders the store before the kernel's look. */
    atomic_thread_fence(memory_order_seq_cst);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void ag_post(_Atomic uint32_t *word, uint32_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
    ag_wake(word);
}

uint32_t ag_peek(_Atomic uint32_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

int32_t ag_compare_and_swap(_Atomic uint64_t *word, uint64_t expected, uint64_t desired)
{
    return atomic_compare_exchange_strong_explicit(word, &expected, desired, memory_order_acq_rel, memory_order_acquire);
}

void ag_store(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

uint64_t ag_load(_Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}
