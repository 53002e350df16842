/* Sums in the order of a tree, given as a postfix program: one pass over memory.
 *
 * The commonest trees (two to four f32 inputs) are single loops. Every other program is carried out block by block on a stack of pointers:
 * an f32 input is never copied, a sum lies in the first-level cache, and the last addition writes the output.
 */
#include "blocks.h"
#include "kernels.h"

#include <string.h>

/* Blocks are whole rows of square lanes, so that a lane goes on where the block before it ended. */
enum { DEEPEST = 64, SCRATCH_FLOATS = 16384, LONGEST_BLOCK = 496, PAST_CACHES = 1 << 18 };
_Static_assert(LONGEST_BLOCK % AG_SQUARE_LANES == 0 && SCRATCH_FLOATS / DEEPEST % AG_SQUARE_LANES == 0, "whole rows");

/* Floats per block: all that is on the stack fits the scratch. */
static int64_t step_for(int32_t depth)
{
    int64_t step = SCRATCH_FLOATS / depth / AG_SQUARE_LANES * AG_SQUARE_LANES;
    return step > LONGEST_BLOCK ? LONGEST_BLOCK : step;
}

/* The depth a program needs, or -1 when it is no program over these inputs. */
static int32_t depth_of(const int32_t *program, int32_t length, int32_t num_inputs)
{
    int32_t held = 0, deepest = 0;
    for (int32_t i = 0; i < length; i++) {
        if (program[i] >= 0 && program[i] < num_inputs)
            held++;
        else if (program[i] == -1 && held >= 2)
            held--;
        else
            return -1;
        deepest = held > deepest ? held : deepest;
    }
    return held == 1 && deepest <= DEEPEST ? deepest : -1;
}

static int equals(const int32_t *program, int32_t length, const int32_t *other, int32_t other_length)
{
    return length == other_length && memcmp(program, other, (size_t)length * sizeof *program) == 0;
}

/* The trees that have a loop of their own; 1 when it was one of them. */
static int whole(const ag_blocks *blocks, float *out, const void *const *inputs, const int32_t *program, int32_t length, int64_t count)
{
    static const int32_t two[] = {0, 1, -1}, three[] = {0, 1, -1, 2, -1}, four[] = {0, 1, -1, 2, 3, -1, -1};
    if (equals(program, length, two, 3))
        blocks->fold[FOLD_F32][FOLD_SUM](out, inputs, 2, count);
    else if (equals(program, length, three, 5))
        blocks->fold[FOLD_F32][FOLD_SUM](out, inputs, 3, count);
    else if (equals(program, length, four, 7))
        blocks->pairs_f32(out, inputs, count);
    else
        return 0;
    return 1;
}

typedef struct {
    const ag_blocks *blocks;
    const void *const *inputs;
    const int32_t *program;
    int32_t length, dtype;
    int64_t step;
} tree;

/* Whether the program goes on with (a + b) + (c + d) of inputs, for which there is one loop. */
static int is_four(const int32_t *program, int32_t length)
{
    return length >= 7 && program[0] >= 0 && program[1] >= 0 && program[2] == -1 && program[3] >= 0 && program[4] >= 0
        && program[5] == -1 && program[6] == -1;
}

/* The n elements from `first` on; their sum goes to `out`. */
static void run_block(const tree *t, float *out, float *scratch, int64_t first, int64_t n)
{
    const void *stack[DEEPEST];
    int32_t held = 0;
    for (int32_t i = 0; i < t->length; i++) {
        float *place = scratch + (int64_t)held * t->step;
        if (t->dtype == AG_F32 && is_four(t->program + i, t->length - i)) {
            const void *four[4];
            for (int k = 0; k < 4; k++)
                four[k] = (const unsigned char *)t->inputs[t->program[i + (k < 2 ? k : k + 1)]] + 4 * first;
            float *sum = i + 7 == t->length ? out : place;
            t->blocks->pairs_f32(sum, four, n);
            stack[held++] = sum;
            i += 6;
            continue;
        }
        if (t->program[i] >= 0) {
            const unsigned char *input = t->inputs[t->program[i]];
            if (t->dtype == AG_BF16)
                t->blocks->widen_bf16(place, input + 2 * first, n), stack[held] = place;
            else if (t->dtype == AG_F16)
                t->blocks->widen_f16(place, input + 2 * first, n), stack[held] = place;
            else
                stack[held] = input + 4 * first;
            held++;
            continue;
        }
        held--;
        float *to = i + 1 == t->length ? out : scratch + (int64_t)(held - 1) * t->step;
        t->blocks->fold[FOLD_F32][FOLD_SUM](to, stack + held - 1, 2, n);
        stack[held - 1] = to;
    }
    if (t->length == 1)
        memmove(out, stack[0], (size_t)n * sizeof *out);
}

int32_t ag_reduce_tree(float *out, const void *const *inputs, int32_t num_inputs, const int32_t *program, int32_t program_length,
                       int64_t count, int32_t dtype)
{
    _Alignas(64) float scratch[SCRATCH_FLOATS];
    if (count < 0 || program == NULL || (dtype != AG_F32 && dtype != AG_BF16 && dtype != AG_F16))
        return AG_BAD;
    int32_t depth = depth_of(program, program_length, num_inputs);
    if (depth < 0 || (count > 0 && (out == NULL || inputs == NULL)))
        return AG_BAD;
    const ag_blocks *blocks = ag_blocks_now();
    if (dtype == AG_F32 && whole(blocks, out, inputs, program, program_length, count))
        return AG_OK;
    const tree t = {blocks, inputs, program, program_length, dtype, step_for(depth)};
    for (int64_t first = 0; first < count; first += t.step)
        run_block(&t, out + first, scratch, first, count - first < t.step ? count - first : t.step);
    return AG_OK;
}

int32_t ag_reduce_pages(float *out, const void *const *inputs, int32_t num_inputs, const int32_t *program, int32_t program_length,
                        const int64_t *bounds, int32_t num_pages, double *squares)
{
    _Alignas(64) float scratch[SCRATCH_FLOATS];
    _Alignas(64) float sum[LONGEST_BLOCK];
    if (num_pages < 0 || program == NULL || (num_pages > 0 && (!out || !inputs || !bounds || !squares)))
        return AG_BAD;
    int32_t depth = depth_of(program, program_length, num_inputs);
    if (depth < 0)
        return AG_BAD;
    const ag_blocks *blocks = ag_blocks_now();
    const tree t = {blocks, inputs, program, program_length, AG_F32, step_for(depth)};
    int64_t count = 0;
    for (int32_t page = 0; page < num_pages; page++)
        count += bounds[2 * page + 1] - bounds[2 * page];
    for (int32_t page = 0; page < num_pages; page++) {
        double lanes[AG_SQUARE_LANES] = {0}, total = 0;
        int64_t stop = bounds[2 * page + 1];
        for (int64_t first = bounds[2 * page]; first < stop; first += t.step) {
            int64_t n = stop - first < t.step ? stop - first : t.step;
            run_block(&t, sum, scratch, first, n);
            blocks->squares_f32(lanes, sum, n);
            if (count >= PAST_CACHES)
                blocks->stream_f32(out + first, sum, n);
            else
                memcpy(out + first, sum, (size_t)n * sizeof *out);
        }
        for (int lane = 0; lane < AG_SQUARE_LANES; lane++)
            total += lanes[lane];
        squares[page] = total;
    }
    blocks->fence();
    return AG_OK;
}
