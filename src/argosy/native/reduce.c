/* The ordered reduction over several inputs: one pass over memory, whatever the type, the operation or the number of inputs.
 *
 * Up to four inputs of a plain type are folded straight into the output. Everything else goes by blocks that stay in the first-level cache:
 * widened, scaled, folded four at a time, divided and narrowed there. The output is written last, so it may be one of the inputs.
 */
#include "blocks.h"
#include "kernels.h"

#include <string.h>

/* The gap keeps the blocks out of each other's cache sets. */
enum { BLOCK_BYTES = 2048, GAP_BYTES = 192 };

typedef struct {
    const ag_blocks *blocks;
    ag_fold fold;
    int32_t dtype, operation, num_inputs;
    int element_bytes; /* of the inputs and the output */
    int wide_bytes;    /* of what is folded: 4 where halves are widened */
    int is_staged;     /* inputs pass through a block before they are folded */
    double factor;
} reduction;

typedef struct {
    _Alignas(64) unsigned char staged[AG_FOLD_WIDTH][BLOCK_BYTES + GAP_BYTES];
    _Alignas(64) unsigned char sum[BLOCK_BYTES];
} scratch;

static int fold_type(int32_t dtype)
{
    switch (dtype) {
    case AG_F32: case AG_BF16: case AG_F16: return FOLD_F32;
    case AG_F64: return FOLD_F64;
    case AG_U8: return FOLD_U8;
    case AG_I8: return FOLD_I8;
    case AG_I16: return FOLD_I16;
    case AG_I32: return FOLD_I32;
    case AG_I64: return FOLD_I64;
    default: return -1;
    }
}

static int fold_operation(int32_t operation)
{
    switch (operation) {
    case AG_SUM: case AG_AVG: case AG_PREMUL_SUM: return FOLD_SUM;
    case AG_MIN: return FOLD_MIN;
    case AG_MAX: return FOLD_MAX;
    case AG_PRODUCT: return FOLD_PRODUCT;
    default: return -1;
    }
}

static int is_half(int32_t dtype)
{
    return dtype == AG_BF16 || dtype == AG_F16;
}

static int bytes_of(int32_t dtype)
{
    static const int bytes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
    return bytes[dtype];
}

/* Prepare, or AG_BAD where the type does not know the operation. */
static int32_t plan(reduction *r, int32_t num_inputs, int32_t dtype, int32_t operation, double factor)
{
    int type = fold_type(dtype), fold = fold_operation(operation);
    int is_float = type == FOLD_F32 || type == FOLD_F64;
    if (type < 0 || fold < 0 || num_inputs < 1)
        return AG_BAD;
    if (!is_float && (operation == AG_AVG || operation == AG_PREMUL_SUM))
        return AG_BAD;
    r->blocks = ag_blocks_now();
    r->fold = r->blocks->fold[type][fold];
    r->dtype = dtype;
    r->operation = operation;
    r->num_inputs = num_inputs;
    r->element_bytes = bytes_of(dtype);
    r->wide_bytes = is_half(dtype) ? 4 : r->element_bytes;
    r->is_staged = is_half(dtype) || operation == AG_PREMUL_SUM;
    r->factor = factor;
    return AG_OK;
}

/* Where the block of one input can be folded from: itself, or its widened and scaled copy. */
static const void *stage(const reduction *r, const void *input, unsigned char *place, int64_t n)
{
    if (!r->is_staged)
        return input;
    const void *from = input;
    if (r->dtype == AG_BF16)
        r->blocks->widen_bf16((float *)place, input, n), from = place;
    else if (r->dtype == AG_F16)
        r->blocks->widen_f16((float *)place, input, n), from = place;
    if (r->operation == AG_PREMUL_SUM) {
        if (r->dtype == AG_F64)
            r->blocks->scale_f64((double *)place, from, r->factor, n);
        else
            r->blocks->scale_f32((float *)place, from, (float)r->factor, n);
    }
    return place;
}

/* What follows the fold: the division of an average, the way back to halves. */
static void finish(const reduction *r, void *out, void *sum, int64_t n)
{
    if (r->operation == AG_AVG && r->dtype == AG_F64) {
        r->blocks->divide_f64(out, sum, (double)r->num_inputs, n);
        return;
    }
    if (r->operation == AG_AVG && r->dtype == AG_F32) {
        r->blocks->divide_f32(out, sum, (float)r->num_inputs, n);
        return;
    }
    if (r->operation == AG_AVG)
        r->blocks->divide_f32(sum, sum, (float)r->num_inputs, n);
    if (r->dtype == AG_BF16)
        r->blocks->narrow_bf16(out, sum, n);
    else if (r->dtype == AG_F16)
        r->blocks->narrow_f16(out, sum, n);
}

static void reduce_block(const reduction *r, unsigned char *out, const void *const *inputs, int64_t first, int64_t n)
{
    scratch s;
    const void *group[AG_FOLD_WIDTH];
    int64_t offset = first * r->element_bytes;
    int is_finished_later = is_half(r->dtype) || r->operation == AG_AVG;
    int32_t next = 0;
    int held = 0; /* how many of `group` are filled; the running result is always the first */
    while (next < r->num_inputs) {
        while (held < AG_FOLD_WIDTH && next < r->num_inputs) {
            group[held] = stage(r, (const unsigned char *)inputs[next] + offset, s.staged[held], n);
            held++, next++;
        }
        int is_last = next == r->num_inputs;
        void *to = is_last && !is_finished_later ? out + offset : s.sum;
        if (held == 1)
            memmove(to, group[0], (size_t)(n * r->wide_bytes));
        else
            r->fold(to, group, held, n);
        group[0] = s.sum;
        held = 1;
    }
    if (is_finished_later)
        finish(r, out + offset, s.sum, n);
}

int32_t ag_reduce(void *out, const void *const *inputs, int32_t num_inputs, int64_t count, int32_t dtype, int32_t operation, double factor)
{
    reduction r;
    if (count < 0 || (count > 0 && (out == NULL || inputs == NULL)))
        return AG_BAD;
    int32_t status = plan(&r, num_inputs, dtype, operation, factor);
    if (status != AG_OK || count == 0)
        return status;
    if (!r.is_staged && operation != AG_AVG && num_inputs > 1 && num_inputs <= AG_FOLD_WIDTH) {
        r.fold(out, inputs, num_inputs, count);
        return AG_OK;
    }
    int64_t step = BLOCK_BYTES / r.wide_bytes;
    for (int64_t first = 0; first < count; first += step)
        reduce_block(&r, out, inputs, first, count - first < step ? count - first : step);
    return AG_OK;
}
