/* Which elements differ, as bytes: equal stretches go by at the speed of memory, eight bytes at a time or wider. */
#include "kernels.h"

#include <string.h>

enum { STRETCH_BYTES = 256 };

static int is_equal_stretch(const unsigned char *a, const unsigned char *b)
{
    /* Without an early exit the compiler makes vectors of it. */
    uint64_t difference = 0;
    for (int i = 0; i < STRETCH_BYTES; i += 8) {
        uint64_t x, y;
        memcpy(&x, a + i, 8);
        memcpy(&y, b + i, 8);
        difference |= x ^ y;
    }
    return difference == 0;
}

typedef struct {
    int64_t found, capacity;
    int64_t *indices;
} finds;

static void scan(const unsigned char *a, const unsigned char *b, int64_t first, int64_t end, int64_t width, finds *f)
{
    for (int64_t i = first; i < end; i++) {
        uint64_t x = 0, y = 0;
        switch (width) {
        case 1: x = a[i], y = b[i]; break;
        case 2: memcpy(&x, a + 2 * i, 2), memcpy(&y, b + 2 * i, 2); break;
        case 4: memcpy(&x, a + 4 * i, 4), memcpy(&y, b + 4 * i, 4); break;
        default: memcpy(&x, a + 8 * i, 8), memcpy(&y, b + 8 * i, 8); break;
        }
        if (x == y)
            continue;
        if (f->found < f->capacity)
            f->indices[f->found] = i;
        f->found++;
    }
}

int64_t ag_changed(const void *a, const void *b, int64_t count, int32_t element_bytes, int64_t *indices, int64_t capacity)
{
    if (count < 0 || capacity < 0 || (element_bytes != 1 && element_bytes != 2 && element_bytes != 4 && element_bytes != 8))
        return -1;
    const unsigned char *x = a, *y = b;
    finds f = {0, indices == NULL ? 0 : capacity, indices};
    int64_t step = STRETCH_BYTES / element_bytes, first = 0;
    for (; first + step <= count; first += step)
        if (!is_equal_stretch(x + first * element_bytes, y + first * element_bytes))
            scan(x, y, first, first + step, element_bytes, &f);
    scan(x, y, first, count, element_bytes, &f);
    return f.found;
}
