/* The collectives of collectives.h: each is a loop over chunks that stages one chunk and finishes the one before it. */
#include "collectives.h"
#include "rows.h"

#include <string.h>

#define AG_PAGE 4096
#define AG_LINE 64
#define AG_BLOCK (32 * 1024) /* reduced and copied on while still in the first-level cache */

_Static_assert(sizeof(ag_segment) <= AG_PAGE, "the header is one page");
_Static_assert(sizeof(ag_rank_page) <= AG_PAGE, "each rank has one page");

#define AG_PAST_CACHES (4 * 1024 * 1024) /* outputs of so many bytes are larger than the caches are worth */
#define AG_STALL_NS INT64_C(50000) /* longer than anybody spins: such a wait has slept */
#define AG_SLICE_NS INT64_C(200000000) /* longer waits go through the caller, who handles signals */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static ag_rank_page *page_of(ag_group *group, int32_t rank) {
    return (ag_rank_page *)((char *)group->segment + AG_PAGE * (int64_t)(1 + rank));
}

static char *slot_of(ag_group *group, int32_t rank, uint32_t parity) {
    int64_t index = (int64_t)(parity & 1) * group->size + rank;
    return (char *)group->segment + AG_PAGE * (int64_t)(1 + group->size) + index * (int64_t)group->segment->slot_bytes;
}

/* This epoch's own slot, and everybody's of the epoch before. */
static char *mine(ag_group *group) { return slot_of(group, group->rank, group->epoch); }
static char *theirs(ag_group *group, int32_t rank) { return slot_of(group, rank, group->epoch - 1); }

static int64_t num_chunks(int64_t count, int64_t chunk) { return count <= chunk ? 1 : (count + chunk - 1) / chunk; }

/* Elements of chunk `index`. */
static int64_t length_of(int64_t index, int64_t count, int64_t chunk) {
    int64_t left = count - index * chunk;
    return left <= 0 ? 0 : smaller(left, chunk);
}

uint32_t ag_group_break(ag_group *group, uint32_t word) {
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&group->segment->broken, &none, word)) return none;
    ag_wake(&group->segment->generation);
    return word;
}

static int32_t first_missing(ag_group *group, uint32_t wanted) {
    for (int32_t rank = 0; rank < group->size; rank++) {
        uint32_t arrived = atomic_load_explicit(&page_of(group, rank)->arrived, memory_order_acquire);
        if ((int32_t)(arrived - wanted) < 0) return rank;
    }
    return -1;
}

/* End the epoch: what all ranks wrote in it can be read now. */
static int32_t meet(ag_group *group, ag_call *call) {
    ag_segment *segment = group->segment;
    if (!call->is_waiting) {
        uint32_t epoch = ++group->epoch;
        atomic_store_explicit(&page_of(group, group->rank)->arrived, epoch, memory_order_release);
        uint64_t arrivals = atomic_fetch_add_explicit(&segment->arrivals, 1, memory_order_acq_rel) + 1;
        /* Arrivals of an epoch begin only after those of the one before have ended: the count tells the last one. */
        if (arrivals % (uint64_t)group->size == 0) {
            ag_post(&segment->generation, epoch);
            return AG_OK;
        }
    }
    int64_t now = ag_now(), slice = smaller(call->deadline_ns, now + AG_SLICE_NS);
    int32_t status = ag_wait(&segment->generation, group->epoch, call->is_waiting ? 0 : group->spin_ns, &group->peers, slice);
    int64_t waited = ag_now() - now;
    if (call->is_waiting || waited > AG_STALL_NS) {
        group->stalls += !call->is_waiting;
        group->stalled_ns += waited;
    }
    call->is_waiting = status == AG_TIMEOUT && slice < call->deadline_ns;
    if (call->is_waiting) return AG_AGAIN;
    if (status == AG_TIMEOUT) group->peers.lost = first_missing(group, group->epoch);
    return status;
}

static void say(ag_group *group, const ag_call *call) {
    ag_descriptor *said = &page_of(group, group->rank)->said[group->epoch & 1];
    uint64_t factor;
    memcpy(&factor, &call->factor, sizeof factor);
    atomic_store_explicit(&said->what, call->what, memory_order_relaxed);
    atomic_store_explicit(&said->count, (uint64_t)call->count, memory_order_relaxed);
    atomic_store_explicit(&said->factor, factor, memory_order_relaxed);
    atomic_store_explicit(&said->call, ++group->calls, memory_order_relaxed);
}

static int same(const ag_descriptor *a, const ag_descriptor *b) {
    return atomic_load_explicit(&a->what, memory_order_relaxed) == atomic_load_explicit(&b->what, memory_order_relaxed) &&
           atomic_load_explicit(&a->count, memory_order_relaxed) == atomic_load_explicit(&b->count, memory_order_relaxed) &&
           atomic_load_explicit(&a->factor, memory_order_relaxed) == atomic_load_explicit(&b->factor, memory_order_relaxed);
}

/* After the first meeting of a call: all must have said the same. Everybody sees the same words, so everybody leaves or nobody does. */
static int32_t compare(ag_group *group) {
    uint32_t parity = (group->epoch - 1) & 1;
    const ag_descriptor *own = &page_of(group, group->rank)->said[parity];
    for (int32_t rank = 0; rank < group->size; rank++) {
        if (!same(own, &page_of(group, rank)->said[parity])) {
            group->peers.lost = rank;
            return AG_MISMATCH;
        }
    }
    return AG_OK;
}

static void copy(void *to, const void *from, int64_t num_bytes) {
    if (num_bytes > 0 && to != from) memmove(to, from, (size_t)num_bytes);
}

/* A part of the caller's output, of num_bytes of `total`. */
static void copy_out(void *to, const void *from, int64_t num_bytes, int64_t total) {
    if (num_bytes <= 0 || to == from) return;
    ag_copy_rows(to, from, num_bytes, 0, NULL, NULL, NULL, total >= AG_PAST_CACHES);
}

/* Reduce one stretch in rank order: the own input comes from the caller's memory, the others' from `offset` of their slots. */
static int32_t reduce_stretch(ag_group *group, const ag_call *call, char *out, const char *own, int64_t offset, int64_t count) {
    const void *inputs[AG_MAX_RANKS];
    for (int32_t rank = 0; rank < group->size; rank++)
        inputs[rank] = rank == group->rank ? own : theirs(group, rank) + offset;
    if (count <= 0) return AG_OK;
    return ag_reduce(out, inputs, group->size, count, call->dtype, call->operation, call->factor);
}

/* How a collective is cut: elements (bytes, where it only copies) of a chunk, how many chunks, how many steps. Outputs are written only
 * from step 1 on, after all have been found to call the same. */
typedef struct {
    int32_t (*step)(ag_group *, ag_call *, int64_t chunk, int64_t index, int64_t n);
    int64_t chunk;
    int64_t n;
    int64_t steps;
} ag_course;

/* All-reduce of one chunk by everybody: one meeting, best for small messages. */
static int32_t whole_step(ag_group *group, ag_call *call, int64_t chunk, int64_t index, int64_t n) {
    (void)chunk, (void)n;
    if (index > 0) return reduce_stretch(group, call, call->outputs[0], call->inputs[0], 0, call->count);
    copy(mine(group), call->inputs[0], call->count * call->element_bytes);
    return AG_OK;
}

/* Elements of a slice when `length` elements are divided among the ranks: whole cache lines, the last slices may be short or empty. */
static int64_t slice_of(const ag_group *group, int64_t length, int64_t element) {
    int64_t line = AG_LINE / element, share = (length + group->size - 1) / group->size;
    return (share + line - 1) / line * line;
}

static void stage_slices(ag_group *group, const ag_call *call, int64_t chunk, int64_t index) {
    const char *in = (const char *)call->inputs[0] + index * chunk * call->element_bytes;
    int64_t length = length_of(index, call->count, chunk), slice = slice_of(group, length, call->element_bytes);
    int64_t before = smaller(length, group->rank * slice), after = smaller(length, (group->rank + 1) * slice);
    char *to = mine(group);
    copy(to, in, before * call->element_bytes);
    copy(to + after * call->element_bytes, in + after * call->element_bytes, (length - after) * call->element_bytes);
}

static int32_t reduce_own_slice(ag_group *group, const ag_call *call, int64_t chunk, int64_t index) {
    int64_t element = call->element_bytes, length = length_of(index, call->count, chunk);
    int64_t slice = slice_of(group, length, element), first = smaller(length, group->rank * slice);
    int64_t count = smaller(length, (group->rank + 1) * slice) - first, block = AG_BLOCK / element;
    const char *in = (const char *)call->inputs[0] + (index * chunk + first) * element;
    char *out = (char *)call->outputs[0] + (index * chunk + first) * element;
    char *result = mine(group) + group->stage_bytes;
    for (int64_t done = 0; done < count; done += block) {
        int64_t part = smaller(block, count - done);
        int32_t status = reduce_stretch(group, call, out + done * element, in + done * element, (first + done) * element, part);
        if (status != AG_OK) return status;
        copy(result + done * element, out + done * element, part * element);
    }
    return AG_OK;
}

static void copy_out_slices(ag_group *group, const ag_call *call, int64_t chunk, int64_t index) {
    int64_t element = call->element_bytes, length = length_of(index, call->count, chunk), slice = slice_of(group, length, element);
    char *out = (char *)call->outputs[0] + index * chunk * element;
    for (int32_t step = 1; step < group->size; step++) {
        int32_t rank = (group->rank + step) % group->size;
        int64_t first = smaller(length, rank * slice), last = smaller(length, (rank + 1) * slice);
        copy_out(out + first * element, theirs(group, rank) + group->stage_bytes, (last - first) * element, call->count * element);
    }
}

/* All-reduce by owners of slices: (P - 1)/P of the data is staged, each element is reduced once. Three chunks are under way. */
static int32_t sliced_step(ag_group *group, ag_call *call, int64_t chunk, int64_t index, int64_t n) {
    int32_t status = AG_OK;
    if (index < n) stage_slices(group, call, chunk, index);
    if (index >= 1 && index <= n) status = reduce_own_slice(group, call, chunk, index - 1);
    if (index >= 2) copy_out_slices(group, call, chunk, index - 2);
    return status;
}

/* Bytes of one rank's share of a slot when every rank has a part in it. */
static int64_t share_of(const ag_group *group) { return group->stage_bytes / group->size / AG_LINE * AG_LINE; }

static int32_t reduce_scatter_step(ag_group *group, ag_call *call, int64_t chunk, int64_t index, int64_t n) {
    int64_t element = call->element_bytes, share = share_of(group), at = (index - 1) * chunk * element;
    int64_t bytes = length_of(index, call->count, chunk) * element;
    for (int32_t rank = 0; rank < group->size && index < n; rank++)
        if (rank != group->rank) copy(mine(group) + rank * share, (const char *)call->inputs[rank] + index * chunk * element, bytes);
    if (index == 0) return AG_OK;
    const char *own = (const char *)call->inputs[group->rank] + at;
    return reduce_stretch(group, call, (char *)call->outputs[0] + at, own, group->rank * share, length_of(index - 1, call->count, chunk));
}

static int32_t reduce_step(ag_group *group, ag_call *call, int64_t chunk, int64_t index, int64_t n) {
    int64_t element = call->element_bytes, at = (index - 1) * chunk * element;
    const char *in = (const char *)call->inputs[0];
    if (group->rank != call->root) {
        if (index < n) copy(mine(group), in + index * chunk * element, length_of(index, call->count, chunk) * element);
        return AG_OK;
    }
    if (index == 0) return AG_OK;
    return reduce_stretch(group, call, (char *)call->outputs[0] + at, in + at, 0, length_of(index - 1, call->count, chunk));
}

/* What a rank stages of a chunk in a broadcast, gather or scatter. */
static void stage_copy(ag_group *group, const ag_call *call, int64_t at, int64_t bytes) {
    int is_root = group->rank == call->root;
    if ((call->kind == AG_GATHER && !is_root) || (call->kind == AG_BROADCAST && is_root))
        copy(mine(group), (const char *)call->inputs[0] + at, bytes);
    if (call->kind != AG_SCATTER || !is_root) return;
    /* Nobody else writes in a scatter, nor to any slot after the last meeting of the call before: the root may use everybody's slots. */
    for (int32_t rank = 0; rank < group->size; rank++)
        if (rank != group->rank) copy(slot_of(group, rank, group->epoch), (const char *)call->inputs[rank] + at, bytes);
}

static void finish_copy(ag_group *group, const ag_call *call, int64_t at, int64_t bytes) {
    int is_root = group->rank == call->root;
    int64_t total = call->count * call->element_bytes;
    if (call->kind == AG_GATHER && is_root) {
        for (int32_t step = 0; step < group->size; step++) { /* the own part first: the input may be another rank's output */
            int32_t rank = (group->rank + step) % group->size;
            const char *from = rank == group->rank ? (const char *)call->inputs[0] + at : theirs(group, rank);
            copy_out((char *)call->outputs[rank] + at, from, bytes, group->size * total);
        }
    } else if (call->kind == AG_BROADCAST && !is_root) {
        copy_out((char *)call->outputs[0] + at, theirs(group, call->root), bytes, total);
    } else if (call->kind == AG_SCATTER) {
        const char *from = is_root ? (const char *)call->inputs[group->rank] + at : theirs(group, group->rank);
        copy((char *)call->outputs[0] + at, from, bytes);
    }
}

/* The own part goes to its slot and to its output in one pass; only that of the first chunk waits until all have been found to call the same. */
static int32_t all_gather_step(ag_group *group, ag_call *call, int64_t chunk, int64_t index, int64_t n) {
    int64_t total = call->count * call->element_bytes, at = index * chunk, bytes = length_of(index, total, chunk);
    int is_large = group->size * total >= AG_PAST_CACHES;
    const char *in = call->inputs[0];
    char *own = call->outputs[group->rank];
    if (index == 1) copy_out(own, in, length_of(0, total, chunk), group->size * total);
    if (index > 0 && index < n && own != in) ag_copy_twice(mine(group), own + at, in + at, bytes, is_large);
    else if (index < n) copy(mine(group), in + at, bytes);
    if (index == 0) return AG_OK;
    for (int32_t step = 1; step < group->size; step++) {
        int32_t rank = (group->rank + step) % group->size;
        char *out = (char *)call->outputs[rank] + at - chunk;
        copy_out(out, theirs(group, rank), length_of(index - 1, total, chunk), group->size * total);
    }
    return AG_OK;
}

static int32_t copy_step(ag_group *group, ag_call *call, int64_t chunk, int64_t index, int64_t n) {
    int64_t total = call->count * call->element_bytes;
    if (index < n) stage_copy(group, call, index * chunk, length_of(index, total, chunk));
    if (index > 0) finish_copy(group, call, (index - 1) * chunk, length_of(index - 1, total, chunk));
    return AG_OK;
}

/* The first two steps of an all-to-all tell everybody who sends how much to whom; whoever sees a difference tells all, since nobody may go
 * on alone. Then the number of chunks is known to all. */
static int32_t read_sizes(ag_group *group, ag_call *call) {
    int64_t verdict = -1;
    call->largest = 0;
    for (int32_t from = group->size - 1; from >= 0; from--) {
        const int64_t *sends = (const int64_t *)(const void *)theirs(group, from);
        for (int32_t to = 0; to < group->size; to++)
            if (sends[to] > call->largest) call->largest = sends[to];
        if (sends[group->rank] != call->output_bytes[from]) verdict = from;
    }
    memcpy(mine(group), &verdict, sizeof verdict);
    return AG_OK;
}

static int32_t read_verdicts(ag_group *group) {
    for (int32_t rank = 0; rank < group->size; rank++) {
        int64_t verdict;
        memcpy(&verdict, theirs(group, rank), sizeof verdict);
        if (verdict < 0) continue;
        group->peers.lost = verdict == group->rank ? rank : (int32_t)verdict;
        return AG_MISMATCH;
    }
    return AG_OK;
}

static int32_t all_to_all_step(ag_group *group, ag_call *call, int64_t chunk, int64_t index, int64_t n) {
    if (index == 0) {
        memcpy(mine(group), call->input_bytes, sizeof(int64_t) * (size_t)group->size);
        return AG_OK;
    }
    if (index == 1) return read_sizes(group, call);
    if (index == 2 && read_verdicts(group) != AG_OK) return AG_MISMATCH;
    int64_t part = index - 2, now = part * chunk, before = now - chunk;
    for (int32_t rank = 0; rank < group->size; rank++) {
        if (part < n && rank != group->rank)
            copy(mine(group) + rank * chunk, (const char *)call->inputs[rank] + now, length_of(part, call->input_bytes[rank], chunk));
        if (part == 0) continue;
        const char *from = rank == group->rank ? (const char *)call->inputs[rank] + before : theirs(group, rank) + group->rank * chunk;
        copy((char *)call->outputs[rank] + before, from, length_of(part - 1, call->output_bytes[rank], chunk));
    }
    return AG_OK;
}

static int32_t meet_step(ag_group *group, ag_call *call, int64_t chunk, int64_t index, int64_t n) {
    (void)group, (void)call, (void)chunk, (void)index, (void)n;
    return AG_OK;
}

static ag_course course_of(const ag_group *group, const ag_call *call) {
    int64_t element = call->element_bytes, chunk = group->chunk_bytes / element;
    switch (call->kind) {
    case AG_MEET: return (ag_course){meet_step, 1, 1, 2};
    case AG_ALL_REDUCE: {
        if (call->count <= group->small_bytes / element) return (ag_course){whole_step, 1, 1, 2};
        int64_t lines = AG_LINE / element * group->size, n;
        chunk = chunk / lines * lines;
        n = chunk > 0 ? num_chunks(call->count, chunk) : 0;
        return (ag_course){sliced_step, chunk, n, n + 2};
    }
    case AG_REDUCE_SCATTER: {
        chunk = smaller(share_of(group), group->chunk_bytes) / element;
        int64_t n = chunk > 0 ? num_chunks(call->count, chunk) : 0;
        return (ag_course){reduce_scatter_step, chunk, n, n + 1};
    }
    case AG_REDUCE: {
        int64_t n = num_chunks(call->count, chunk);
        return (ag_course){reduce_step, chunk, n, n + 1};
    }
    case AG_ALL_TO_ALL: {
        /* `largest` is known from step 1 on: before that the course is longer than what is done of it. */
        int64_t share = share_of(group), n = share > 0 ? num_chunks(call->largest, share) : 0;
        return (ag_course){all_to_all_step, share, n, n + 3};
    }
    case AG_ALL_GATHER: {
        int64_t n = num_chunks(call->count * element, group->chunk_bytes);
        return (ag_course){all_gather_step, group->chunk_bytes, n, n + 1};
    }
    case AG_BROADCAST:
    case AG_GATHER:
    case AG_SCATTER: {
        int64_t n = num_chunks(call->count * element, group->chunk_bytes);
        return (ag_course){copy_step, group->chunk_bytes, n, n + 1};
    }
    default: return (ag_course){NULL, 0, 0, 0};
    }
}

static int32_t carry_out(ag_group *group, ag_call *call) {
    for (;;) {
        ag_course course = course_of(group, call);
        if (course.step == NULL || course.chunk <= 0) return AG_BAD;
        int32_t status = call->is_waiting ? AG_OK : course.step(group, call, course.chunk, call->step, course.n);
        if (status != AG_OK) return status;
        course = course_of(group, call);
        if (call->step + 1 == course.steps) return AG_OK;
        status = meet(group, call);
        if (status == AG_OK && call->step == 0) status = compare(group);
        if (status != AG_OK) return status;
        call->step++;
    }
}

int32_t ag_collective(ag_group *group, ag_call *call) {
    if (group->size < 1 || group->size > AG_MAX_RANKS || call->count < 0 || call->element_bytes < 1) return AG_BAD;
    if (!call->is_waiting) {
        if (atomic_load_explicit(&group->segment->broken, memory_order_acquire)) return AG_BROKEN;
        say(group, call);
    }
    int32_t status = carry_out(group, call);
    /* All leave together: whoever sees the reason first tells the others. A mismatch all see by themselves. */
    if (status == AG_PEER_LOST || status == AG_TIMEOUT)
        ag_group_break(group, (1u + (uint32_t)group->peers.lost) | (uint32_t)status << AG_REASON_SHIFT);
    return status;
}

int64_t ag_collectives_layout(int32_t which) {
    switch (which) {
    case 0: return (int64_t)sizeof(ag_group);
    case 1: return (int64_t)sizeof(ag_call);
    case 2: return (int64_t)sizeof(ag_segment);
    default: return (int64_t)sizeof(ag_rank_page);
    }
}
