/* The collectives of collectives.h: each is a loop over chunks that stages one chunk and finishes the one before it. */
#include "collectives.h"

#include <string.h>

#define AG_PAGE 4096
#define AG_LINE 64
#define AG_BLOCK (32 * 1024) /* reduced and copied on while still in the first-level cache */

_Static_assert(sizeof(ag_segment) <= AG_PAGE, "the header is one page");
_Static_assert(sizeof(ag_rank_page) <= AG_PAGE, "each rank has one page");

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
static int32_t meet(ag_group *group, int64_t deadline_ns) {
    ag_segment *segment = group->segment;
    uint32_t wanted = ++group->epoch;
    atomic_store_explicit(&page_of(group, group->rank)->arrived, wanted, memory_order_release);
    uint64_t arrivals = atomic_fetch_add_explicit(&segment->arrivals, 1, memory_order_acq_rel) + 1;
    /* Arrivals of an epoch complete only after those of the one before: the count tells the last one. */
    if (arrivals % (uint64_t)group->size == 0) {
        ag_post(&segment->generation, wanted);
        return AG_OK;
    }
    group->peers.lost = -1;
    int32_t status = ag_wait(&segment->generation, wanted, group->spin_ns, &group->peers, deadline_ns);
    if (status == AG_OK) return AG_OK;
    /* A peer may have come, finished and ended since: then nothing is lost. */
    uint32_t generation = atomic_load_explicit(&segment->generation, memory_order_acquire);
    if ((int32_t)(generation - wanted) >= 0) return AG_OK;
    if (status == AG_TIMEOUT) group->peers.lost = first_missing(group, wanted);
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

/* The first meeting of a call: all must have said the same. Everybody sees the same words, so everybody leaves or nobody does. */
static int32_t meet_and_compare(ag_group *group, int64_t deadline_ns) {
    uint32_t parity = group->epoch & 1;
    int32_t status = meet(group, deadline_ns);
    if (status != AG_OK) return status;
    const ag_descriptor *own = &page_of(group, group->rank)->said[parity];
    for (int32_t rank = 0; rank < group->size; rank++) {
        if (!same(own, &page_of(group, rank)->said[parity])) {
            group->peers.lost = rank;
            return AG_MISMATCH;
        }
    }
    return AG_OK;
}

static int32_t end_epoch(ag_group *group, const ag_call *call, int64_t index) {
    return index == 0 ? meet_and_compare(group, call->deadline_ns) : meet(group, call->deadline_ns);
}

static void copy(void *to, const void *from, int64_t num_bytes) {
    if (num_bytes > 0 && to != from) memmove(to, from, (size_t)num_bytes);
}

/* Reduce one stretch in rank order: the own input comes from the caller's memory, the others' from `offset` of their slots. */
static int32_t reduce_stretch(ag_group *group, const ag_call *call, char *out, const char *own, int64_t offset, int64_t count) {
    const void *inputs[AG_MAX_RANKS];
    for (int32_t rank = 0; rank < group->size; rank++)
        inputs[rank] = rank == group->rank ? own : theirs(group, rank) + offset;
    if (count <= 0) return AG_OK;
    return ag_reduce(out, inputs, group->size, count, call->dtype, call->operation, call->factor);
}

/* All-reduce in which every rank reduces everything: one meeting per chunk, best for small messages and for two ranks. */
static int32_t all_reduce_whole(ag_group *group, const ag_call *call) {
    const char *in = call->inputs[0];
    char *out = call->outputs[0];
    int64_t element = call->element_bytes, chunk = smaller(group->stage_bytes, group->chunk_bytes) / element;
    if (call->count * element <= group->stage_bytes && call->count * element <= group->small_bytes) chunk = call->count;
    int64_t n = num_chunks(call->count, chunk);
    for (int64_t index = 0; index <= n; index++) {
        if (index < n) copy(mine(group), in + index * chunk * element, length_of(index, call->count, chunk) * element);
        if (index > 0) {
            int64_t at = (index - 1) * chunk * element;
            int32_t status = reduce_stretch(group, call, out + at, in + at, 0, length_of(index - 1, call->count, chunk));
            if (status != AG_OK) return status;
        }
        int32_t status = index < n ? end_epoch(group, call, index) : AG_OK;
        if (status != AG_OK) return status;
    }
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
        copy(out + first * element, theirs(group, rank) + group->stage_bytes, (last - first) * element);
    }
}

/* All-reduce by owners of slices: (P - 1)/P of the data is staged, each element is reduced once. */
static int32_t all_reduce_sliced(ag_group *group, const ag_call *call) {
    int64_t line = AG_LINE / call->element_bytes * group->size;
    int64_t chunk = group->chunk_bytes / call->element_bytes / line * line;
    if (chunk <= 0) return AG_BAD;
    int64_t n = num_chunks(call->count, chunk);
    for (int64_t index = 0; index < n + 2; index++) {
        if (index < n) stage_slices(group, call, chunk, index);
        if (index >= 1 && index <= n) {
            int32_t status = reduce_own_slice(group, call, chunk, index - 1);
            if (status != AG_OK) return status;
        }
        if (index >= 2) copy_out_slices(group, call, chunk, index - 2);
        int32_t status = index <= n ? end_epoch(group, call, index) : AG_OK;
        if (status != AG_OK) return status;
    }
    return AG_OK;
}

static int32_t all_reduce(ag_group *group, const ag_call *call) {
    if (call->count <= group->small_bytes / call->element_bytes) return all_reduce_whole(group, call);
    return all_reduce_sliced(group, call);
}

/* Bytes of one rank's share of a slot when every rank has a part in it. */
static int64_t share_of(const ag_group *group) { return group->stage_bytes / group->size / AG_LINE * AG_LINE; }

static int32_t reduce_scatter(ag_group *group, const ag_call *call) {
    int64_t element = call->element_bytes, share = share_of(group), chunk = share / element;
    if (chunk <= 0) return AG_BAD;
    int64_t n = num_chunks(call->count, chunk);
    for (int64_t index = 0; index <= n; index++) {
        int64_t bytes = length_of(index, call->count, chunk) * element;
        for (int32_t rank = 0; rank < group->size && index < n; rank++)
            if (rank != group->rank) copy(mine(group) + rank * share, (const char *)call->inputs[rank] + index * chunk * element, bytes);
        if (index > 0) {
            int64_t at = (index - 1) * chunk * element;
            const char *own = (const char *)call->inputs[group->rank] + at;
            char *out = (char *)call->outputs[0] + at;
            int32_t status = reduce_stretch(group, call, out, own, group->rank * share, length_of(index - 1, call->count, chunk));
            if (status != AG_OK) return status;
        }
        int32_t status = index < n ? end_epoch(group, call, index) : AG_OK;
        if (status != AG_OK) return status;
    }
    return AG_OK;
}

static int32_t reduce_to_root(ag_group *group, const ag_call *call) {
    int64_t element = call->element_bytes, chunk = smaller(group->stage_bytes, group->chunk_bytes) / element;
    int64_t n = num_chunks(call->count, chunk);
    for (int64_t index = 0; index <= n; index++) {
        const char *in = (const char *)call->inputs[0] + index * chunk * element;
        if (index < n && group->rank != call->root) copy(mine(group), in, length_of(index, call->count, chunk) * element);
        if (index > 0 && group->rank == call->root) {
            int64_t at = (index - 1) * chunk * element;
            const char *own = (const char *)call->inputs[0] + at;
            int32_t status = reduce_stretch(group, call, (char *)call->outputs[0] + at, own, 0, length_of(index - 1, call->count, chunk));
            if (status != AG_OK) return status;
        }
        int32_t status = index < n ? end_epoch(group, call, index) : AG_OK;
        if (status != AG_OK) return status;
    }
    return AG_OK;
}

/* What a rank stages of chunk `index` in a collective that only copies. */
static void stage_copy(ag_group *group, const ag_call *call, int64_t at, int64_t bytes) {
    int is_root = group->rank == call->root;
    if (call->kind == AG_ALL_GATHER || (call->kind == AG_GATHER && !is_root) || (call->kind == AG_BROADCAST && is_root))
        copy(mine(group), (const char *)call->inputs[0] + at, bytes);
    if (call->kind != AG_SCATTER || !is_root) return;
    /* Nobody else writes in a scatter: the root may use everybody's slots. */
    for (int32_t rank = 0; rank < group->size; rank++)
        if (rank != group->rank) copy(slot_of(group, rank, group->epoch), (const char *)call->inputs[rank] + at, bytes);
}

static void finish_copy(ag_group *group, const ag_call *call, int64_t at, int64_t bytes) {
    int is_root = group->rank == call->root;
    if (call->kind == AG_ALL_GATHER || (call->kind == AG_GATHER && is_root)) {
        for (int32_t rank = 0; rank < group->size; rank++) {
            const char *from = rank == group->rank ? (const char *)call->inputs[0] + at : theirs(group, rank);
            copy((char *)call->outputs[rank] + at, from, bytes);
        }
    } else if (call->kind == AG_BROADCAST && !is_root) {
        copy((char *)call->outputs[0] + at, theirs(group, call->root), bytes);
    } else if (call->kind == AG_SCATTER) {
        const char *from = is_root ? (const char *)call->inputs[group->rank] + at : theirs(group, group->rank);
        copy((char *)call->outputs[0] + at, from, bytes);
    }
}

static int32_t copy_collective(ag_group *group, const ag_call *call) {
    int64_t total = call->count * call->element_bytes, chunk = smaller(group->stage_bytes, group->chunk_bytes);
    int64_t n = num_chunks(total, chunk);
    for (int64_t index = 0; index <= n; index++) {
        if (index < n) stage_copy(group, call, index * chunk, length_of(index, total, chunk));
        if (index > 0) finish_copy(group, call, (index - 1) * chunk, length_of(index - 1, total, chunk));
        int32_t status = index < n ? end_epoch(group, call, index) : AG_OK;
        if (status != AG_OK) return status;
    }
    return AG_OK;
}

/* The first epoch of an all-to-all tells everybody who sends how much to whom: sizes are checked and the number of chunks is known. */
static int32_t agree_on_sizes(ag_group *group, const ag_call *call, int64_t *largest) {
    memcpy(mine(group), call->input_bytes, sizeof(int64_t) * (size_t)group->size);
    int32_t status = meet_and_compare(group, call->deadline_ns);
    if (status != AG_OK) return status;
    *largest = 0;
    int32_t wrong = -1;
    for (int32_t from = group->size - 1; from >= 0; from--) {
        const int64_t *sends = (const int64_t *)(const void *)theirs(group, from);
        for (int32_t to = 0; to < group->size; to++)
            if (sends[to] > *largest) *largest = sends[to];
        if (sends[group->rank] != call->output_bytes[from]) wrong = from;
    }
    /* Whoever sees a difference tells all: nobody may go on alone. */
    int64_t verdict = wrong;
    memcpy(mine(group), &verdict, sizeof verdict);
    status = meet(group, call->deadline_ns);
    if (status != AG_OK) return status;
    for (int32_t rank = 0; rank < group->size; rank++) {
        memcpy(&verdict, theirs(group, rank), sizeof verdict);
        if (verdict < 0) continue;
        group->peers.lost = rank == group->rank ? (int32_t)verdict : rank;
        return AG_MISMATCH;
    }
    return AG_OK;
}

static int32_t all_to_all(ag_group *group, const ag_call *call) {
    int64_t share = share_of(group), largest = 0;
    if (share <= 0) return AG_BAD;
    int32_t status = agree_on_sizes(group, call, &largest);
    if (status != AG_OK) return status;
    int64_t n = num_chunks(largest, share);
    for (int64_t index = 0; index <= n; index++) {
        for (int32_t rank = 0; rank < group->size; rank++) {
            int64_t now = index * share, before = now - share;
            if (index < n && rank != group->rank)
                copy(mine(group) + rank * share, (const char *)call->inputs[rank] + now, length_of(index, call->input_bytes[rank], share));
            if (index == 0) continue;
            const char *from = rank == group->rank ? (const char *)call->inputs[rank] + before : theirs(group, rank) + group->rank * share;
            copy((char *)call->outputs[rank] + before, from, length_of(index - 1, call->output_bytes[rank], share));
        }
        status = index < n ? meet(group, call->deadline_ns) : AG_OK;
        if (status != AG_OK) return status;
    }
    return AG_OK;
}

static int32_t carry_out(ag_group *group, const ag_call *call) {
    switch (call->kind) {
    case AG_MEET: return meet_and_compare(group, call->deadline_ns);
    case AG_ALL_REDUCE: return all_reduce(group, call);
    case AG_REDUCE_SCATTER: return reduce_scatter(group, call);
    case AG_REDUCE: return reduce_to_root(group, call);
    case AG_ALL_TO_ALL: return all_to_all(group, call);
    case AG_ALL_GATHER:
    case AG_BROADCAST:
    case AG_GATHER:
    case AG_SCATTER: return copy_collective(group, call);
    default: return AG_BAD;
    }
}

int32_t ag_collective(ag_group *group, const ag_call *call) {
    if (group->size < 1 || group->size > AG_MAX_RANKS || call->count < 0 || call->element_bytes < 1) return AG_BAD;
    if (atomic_load_explicit(&group->segment->broken, memory_order_acquire)) return AG_BROKEN;
    say(group, call);
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
