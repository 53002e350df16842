/* Copies of rows: equal runs of bytes that lie at regular distances in both memories. */
#ifndef ARGOSY_ROWS_H
#define ARGOSY_ROWS_H

#include <stdint.h>

/* Copy `row_bytes` from each place of an outer grid to the same place of another; distances in bytes, outermost first. Memories do not overlap.
 * Large copies go past the caches, as memcpy's do: a row alone is too short for memcpy to see that. */
void ag_copy_rows(void *dst, const void *src, int64_t row_bytes, int32_t num_dims, const int64_t *sizes,
                  const int64_t *dst_steps, const int64_t *src_steps);

#endif
