/* What one path offers on blocks: element-wise folds, conversions and scalings, used by reduce.c and tree.c.
 *
 * Every function works element by element in the order of its inputs, on pointers of any alignment, with out equal to an input or apart from
 * all of them. The tables of all paths give the same bits; paths.c says which one to take.
 */
#ifndef ARGOSY_BLOCKS_H
#define ARGOSY_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

enum { AG_FOLD_WIDTH = 4, AG_FOLD_TYPES = 7, AG_FOLDS = 4 };

/* out[i] = in[0][i] op ... op in[n - 1][i], n from 2 to AG_FOLD_WIDTH. */
typedef void (*ag_fold)(void *out, const void *const *in, int n, int64_t count);
typedef void (*ag_widen)(float *out, const void *in, int64_t count);
typedef void (*ag_narrow)(void *out, const float *in, int64_t count);

enum ag_fold_type { FOLD_F32, FOLD_F64, FOLD_U8, FOLD_I8, FOLD_I16, FOLD_I32, FOLD_I64 };
enum ag_fold_operation { FOLD_SUM, FOLD_MIN, FOLD_MAX, FOLD_PRODUCT };

typedef struct {
    ag_fold fold[AG_FOLD_TYPES][AG_FOLDS];
    ag_widen widen_bf16, widen_f16;
    ag_narrow narrow_bf16, narrow_f16;
    void (*scale_f32)(float *out, const void *in, float factor, int64_t count);
    void (*scale_f64)(double *out, const void *in, double factor, int64_t count);
    void (*divide_f32)(void *out, const float *in, float divisor, int64_t count);
    void (*divide_f64)(void *out, const double *in, double divisor, int64_t count);
    /* (a + b) + (c + d), the tree over four inputs without a detour through memory. */
    void (*pairs_f32)(float *out, const void *const *in, int64_t count);
    /* Squares of the elements added to AG_SQUARE_LANES sums, see ag_reduce_pages. */
    void (*squares_f32)(double *lanes, const float *in, int64_t count);
    /* A copy that leaves nothing in the caches where the path can; `fence` orders it before what follows. */
    void (*stream_f32)(float *to, const float *in, int64_t count);
    void (*fence)(void);
} ag_blocks;

/* The table of the path that is in force. */
const ag_blocks *ag_blocks_now(void);

#endif
