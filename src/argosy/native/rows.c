/* Copies of rows, for moving a part of a tensor between two layouts.
 *
 * A row-wise memcpy reads every line of the destination before it overwrites it, since each row by itself is short. When the caller knows that all
 * it moves is larger than the caches are worth, whole lines are stored past them: a third less traffic. Order of stores does not matter to the caller until a
 * later release store, which the fence at the end makes safe.
 */
#include "rows.h"

#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { LINE = 64, LEAST_ROW = 1024, LONG_ROW = 16384, AHEAD = 16 * LINE, BAND = 4 };

#if defined(__x86_64__)
static void stream_line(unsigned char *dst, const unsigned char *src)
{
    __m128i a = _mm_loadu_si128((const __m128i *)src);
    __m128i b = _mm_loadu_si128((const __m128i *)src + 1);
    __m128i c = _mm_loadu_si128((const __m128i *)src + 2);
    __m128i d = _mm_loadu_si128((const __m128i *)src + 3);
    _mm_stream_si128((__m128i *)dst, a);
    _mm_stream_si128((__m128i *)dst + 1, b);
    _mm_stream_si128((__m128i *)dst + 2, c);
    _mm_stream_si128((__m128i *)dst + 3, d);
}

/* Both pointers at any alignment; only whole lines of the destination are streamed. `ahead`: how far before its use a line is asked for. */
static void copy_past_caches(unsigned char *dst, const unsigned char *src, int64_t num_bytes, int64_t ahead)
{
    int64_t head = (int64_t)((LINE - ((uintptr_t)dst & (LINE - 1))) & (LINE - 1));
    memcpy(dst, src, (size_t)head);
    dst += head, src += head, num_bytes -= head;
    for (; num_bytes >= LINE; num_bytes -= LINE, dst += LINE, src += LINE) {
        _mm_prefetch((const char *)src + ahead, _MM_HINT_T0);
        stream_line(dst, src);
    }
    memcpy(dst, src, (size_t)num_bytes);
}
#endif

#if defined(__x86_64__)
/* Rows whose first bytes lie alike in their lines, several at once, line by line: the processor follows each of them by itself,
 * and one's jump to another page is waited for while the others are copied. A third quicker than one row after the other. */
static void copy_band_past_caches(unsigned char *dst, const unsigned char *src, int64_t num_bytes, int64_t dst_step, int64_t src_step)
{
    int64_t head = (int64_t)((LINE - ((uintptr_t)dst & (LINE - 1))) & (LINE - 1));
    int64_t tail = head + ((num_bytes - head) & ~(int64_t)(LINE - 1));
    for (int row = 0; row < BAND; row++) {
        memcpy(dst + row * dst_step, src + row * src_step, (size_t)head);
        memcpy(dst + row * dst_step + tail, src + row * src_step + tail, (size_t)(num_bytes - tail));
    }
    for (int64_t at = head; at < tail; at += LINE)
        for (int row = 0; row < BAND; row++)
            stream_line(dst + row * dst_step + at, src + row * src_step + at);
}

static void copy_twice_past_caches(unsigned char *near, unsigned char *far, const unsigned char *src, int64_t num_bytes)
{
    int64_t head = (int64_t)((LINE - ((uintptr_t)far & (LINE - 1))) & (LINE - 1));
    head = head < num_bytes ? head : num_bytes;
    memcpy(near, src, (size_t)head);
    memcpy(far, src, (size_t)head);
    near += head, far += head, src += head, num_bytes -= head;
    for (; num_bytes >= LINE; num_bytes -= LINE, near += LINE, far += LINE, src += LINE) {
        _mm_prefetch((const char *)src + AHEAD, _MM_HINT_T0);
        for (int i = 0; i < 4; i++) {
            __m128i value = _mm_loadu_si128((const __m128i *)src + i);
            _mm_storeu_si128((__m128i *)near + i, value);
            _mm_stream_si128((__m128i *)far + i, value);
        }
    }
    memcpy(near, src, (size_t)num_bytes);
    memcpy(far, src, (size_t)num_bytes);
}
#endif

static void copy_row(unsigned char *dst, const unsigned char *src, int64_t num_bytes, int is_streamed, int64_t ahead)
{
#if defined(__x86_64__)
    if (is_streamed) {
        copy_past_caches(dst, src, num_bytes, ahead);
        return;
    }
#else
    (void)is_streamed;
    (void)ahead;
#endif
    memcpy(dst, src, (size_t)num_bytes);
}

struct grid {
    int64_t row_bytes;
    int32_t num_dims;
    int is_streamed;
    const int64_t *sizes, *dst_steps, *src_steps;
};

static void copy_grid(const struct grid *grid, unsigned char *dst, const unsigned char *src, int32_t dim)
{
    if (dim == grid->num_dims) {
        copy_row(dst, src, grid->row_bytes, grid->is_streamed, AHEAD);
        return;
    }
    int64_t count = grid->sizes[dim], dst_step = grid->dst_steps[dim], src_step = grid->src_steps[dim];
    if (dim + 1 == grid->num_dims) {
        int64_t i = 0;
#if defined(__x86_64__)
        if (grid->is_streamed && grid->row_bytes < LONG_ROW && dst_step % LINE == 0)
            for (; i + BAND <= count; i += BAND)
                copy_band_past_caches(dst + i * dst_step, src + i * src_step, grid->row_bytes, dst_step, src_step);
#endif
        /* The processor foresees lines inside a row, not the jump to the next: short rows ask for the one after the next. */
        int is_short = grid->row_bytes < LONG_ROW;
        for (; i < count; i++) {
            int64_t ahead = is_short && i + 2 < count ? 2 * src_step : AHEAD;
            copy_row(dst + i * dst_step, src + i * src_step, grid->row_bytes, grid->is_streamed, ahead);
        }
        return;
    }
    for (int64_t i = 0; i < count; i++)
        copy_grid(grid, dst + i * dst_step, src + i * src_step, dim + 1);
}

void ag_copy_twice(void *near, void *far, const void *src, int64_t num_bytes, int32_t is_streamed)
{
#if defined(__x86_64__)
    if (is_streamed) {
        copy_twice_past_caches(near, far, src, num_bytes);
        _mm_sfence();
        return;
    }
#else
    (void)is_streamed;
#endif
    memcpy(near, src, (size_t)num_bytes);
    memcpy(far, near, (size_t)num_bytes);
}

void ag_copy_rows(void *dst, const void *src, int64_t row_bytes, int32_t num_dims, const int64_t *sizes,
                  const int64_t *dst_steps, const int64_t *src_steps, int32_t is_streamed)
{
    is_streamed = is_streamed && row_bytes >= LEAST_ROW;
    struct grid grid = {row_bytes, num_dims, is_streamed, sizes, dst_steps, src_steps};
    copy_grid(&grid, dst, src, 0);
#if defined(__x86_64__)
    if (is_streamed)
        _mm_sfence();
#endif
}
