/* Collectives between processes of one host, over one shared segment per group.
 *
 * Time passes in epochs. In epoch t a rank writes only its slot of parity t and reads only slots of parity t - 1; a meeting of all ranks ends
 * the epoch. So one meeting per chunk is enough, nothing waits after the last one, and a call may start in the epoch in which another ended.
 * Python declares the same structures in move/segment.py; change ARGOSY_COLLECTIVES with them.
 */
#ifndef ARGOSY_COLLECTIVES_H
#define ARGOSY_COLLECTIVES_H

#include "kernels.h"

#define ARGOSY_COLLECTIVES 1
#define AG_MAX_RANKS 256
#define AG_REASON_SHIFT 20
#define AG_AGAIN 16

enum ag_kind {
    AG_MEET = 0,
    AG_ALL_REDUCE = 1,
    AG_REDUCE_SCATTER = 2,
    AG_ALL_GATHER = 3,
    AG_BROADCAST = 4,
    AG_REDUCE = 5,
    AG_GATHER = 6,
    AG_SCATTER = 7,
    AG_ALL_TO_ALL = 8
};

/* What a rank says about its call: compared word by word, so two different calls never look alike. */
typedef struct {
    _Atomic uint64_t what;   /* ag_call.what */
    _Atomic uint64_t count;  /* elements of one part */
    _Atomic uint64_t factor; /* bits of the multiplier of PREMUL_SUM */
    _Atomic uint64_t call;   /* how many calls this rank has made; not compared */
} ag_descriptor;

/* One page per rank. `arrived` tells who is missing; `text` is written only by a rank that has seen a mismatch. */
typedef struct {
    ag_descriptor said[2]; /* by parity of the epoch */
    _Atomic uint32_t arrived;
    uint8_t pad0[60];
    _Atomic uint32_t text_bytes;
    uint8_t pad1[60];
    char text[3840];
} ag_rank_page;

/* The first page of the segment. */
typedef struct {
    _Atomic uint64_t magic; /* stored last */
    uint32_t version;
    uint32_t abi;
    uint64_t size;
    uint64_t nonce;
    uint32_t num_ranks;
    uint32_t native;
    uint64_t slot_bytes;
    uint8_t pad0[16];
    _Atomic uint32_t broken; /* 0, or 1 + rank + (status << AG_REASON_SHIFT) */
    uint8_t pad1[60];
    _Atomic uint64_t arrivals;
    uint8_t pad2[56];
    _Atomic uint32_t generation; /* epochs that have ended */
    uint8_t pad3[60];
} ag_segment;

/* One process's side of a group; lives in its own memory and belongs to one call at a time. */
typedef struct {
    ag_segment *segment;
    int32_t rank;
    int32_t size;
    uint32_t epoch;
    uint32_t calls;
    int64_t stage_bytes; /* of a slot: what is staged for others; the rest holds reduced slices */
    int64_t small_bytes; /* up to here every rank reduces everything by itself */
    int64_t chunk_bytes; /* of larger messages; at most stage_bytes */
    int64_t spin_ns;
    ag_peers peers;
    int64_t stalls; /* meetings that had to sleep, and how long */
    int64_t stalled_ns;
} ag_group;

/* One call. Parts are those of the ranks in rank order; all have `count` elements, except in an all-to-all. */
typedef struct {
    int32_t kind;
    int32_t dtype; /* enum ag_dtype, where something is reduced */
    int32_t operation;
    int32_t root;
    uint64_t what; /* compared between the ranks and shown to people: kind, dtype, operation, root */
    int64_t count;
    int64_t element_bytes;
    double factor;
    int64_t deadline_ns;
    const void *const *inputs;
    void *const *outputs;
    const int64_t *input_bytes; /* all-to-all: bytes for each rank, and from each rank */
    const int64_t *output_bytes;
    int64_t step;    /* of this library: where the call stands */
    int64_t largest; /* of this library: the longest message of an all-to-all */
    int32_t is_waiting;
    int32_t pad;
} ag_call;

#pragma GCC visibility push(default)

/* Carry out one call, or a part of it: AG_AGAIN asks to be called again with the same arguments, so that a caller who waits long can look
 * at its signals. On AG_PEER_LOST, AG_TIMEOUT and AG_MISMATCH peers.lost names the rank; no output has been written on AG_MISMATCH. */
int32_t ag_collective(ag_group *group, ag_call *call);

/* Break the group for everybody, once: the first reason stays. Returns the word that holds. */
uint32_t ag_group_break(ag_group *group, uint32_t word);

/* sizeof(ag_group) and sizeof(ag_call), for the declaration's test. */
int64_t ag_collectives_layout(int32_t which);

#pragma GCC visibility pop

#endif
