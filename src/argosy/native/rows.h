/* Copies of rows: equal runs of bytes that lie at regular distances in both memories. */
#ifndef ARGOSY_ROWS_H
#define ARGOSY_ROWS_H

#include <stdint.h>

/* Copy `row_bytes` from each place of an outer grid to the same place of another; distances in bytes, outermost first. Memories do not overlap.
 * `is_streamed`: past the caches, as memcpy does by itself with large blocks; the caller says so because a row alone is too short to see it. */
void ag_copy_rows(void *dst, const void *src, int64_t row_bytes, int32_t num_dims, const int64_t *sizes,
                  const int64_t *dst_steps, const int64_t *src_steps, int32_t is_streamed);

/* Copy to two places at once, so that the source is read once: `near` is read again soon, `far` goes past the caches when `is_streamed`.
 * No two of the three memories overlap. */
void ag_copy_twice(void *near, void *far, const void *src, int64_t num_bytes, int32_t is_streamed);

#endif
