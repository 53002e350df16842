/* Argosy's native kernels: plain C11 on raw pointers, no Python and no torch headers.
 *
 * Everything here may be called without the GIL, from any thread. Nothing allocates on a hot path, nothing keeps state.
 * What is shared between processes is 32-bit and 64-bit words with C11 atomics: correct on weakly ordered CPUs.
 * Python declares the same functions in loader.py; ARGOSY_ABI changes whenever a signature or a layout does.
 */
#ifndef ARGOSY_KERNELS_H
#define ARGOSY_KERNELS_H

#include <stdatomic.h>
#include <stdint.h>

#define ARGOSY_ABI 5

/* How a wait ended. */
enum ag_status {
    AG_OK = 0,
    AG_TIMEOUT = 1,   /* the deadline has passed */
    AG_PEER_LOST = 2, /* a peer's process has ended; ag_peers.lost says which */
    AG_BROKEN = 3,    /* somebody has set the broken word: whoever waits must give up */
    AG_MISMATCH = 4,  /* peers call different things; ag_peers.lost says which */
    AG_BAD = 5        /* arguments that make no sense */
};

enum ag_dtype {
    AG_F32 = 0, AG_F64 = 1, AG_BF16 = 2, AG_F16 = 3, AG_U8 = 4, AG_I8 = 5, AG_I16 = 6, AG_I32 = 7, AG_I64 = 8
};

enum ag_operation { AG_SUM = 0, AG_AVG = 1, AG_MIN = 2, AG_MAX = 3, AG_PRODUCT = 4, AG_PREMUL_SUM = 5 };

/* Who must be alive while somebody waits for them. */
typedef struct {
    int32_t count;
    int32_t lost;            /* out: index of the peer that was lost or differs, -1 if none */
    const int32_t *pidfds;   /* count descriptors; -1 for this process itself or one that cannot be watched */
    _Atomic uint32_t *broken; /* shared; 0 while all is well; may be NULL */
} ag_peers;

int32_t ag_abi(void);

/* What the run-time dispatch has chosen, as a text that belongs to the numerics fingerprint ("avx2", "baseline", ...). */
const char *ag_path(void);

/* For tests: take this path from now on (one of those this CPU can run), or the best one again for NULL or "". AG_BAD if it cannot run here. */
int32_t ag_force_path(const char *name);

/* Nanoseconds of CLOCK_MONOTONIC, the clock of every deadline here. */
int64_t ag_now(void);

/* Wait until *word has reached `wanted` (wrap-around comparison: (int32_t)(*word - wanted) >= 0); acquire.
 * Spins for `spin_ns` at most, then sleeps in slices of a futex that is woken by ag_wake, looking at peers and deadline in between.
 * peers may be NULL. deadline_ns is absolute. */
int32_t ag_wait(_Atomic uint32_t *word, uint32_t wanted, int64_t spin_ns, ag_peers *peers, int64_t deadline_ns);

/* Store with release, then wake every waiter of the word. */
void ag_post(_Atomic uint32_t *word, uint32_t value);

/* Wake every waiter of the word without changing it. */
void ag_wake(_Atomic uint32_t *word);

/* The word as it is now; acquire. */
uint32_t ag_peek(_Atomic uint32_t *word);

/* out[i] = inputs[0][i] op inputs[1][i] op ... in exactly this order for every i, whatever the path or the alignment.
 * bf16 and f16 accumulate in f32 and round once at the end. AVG divides by num_inputs (floats only: integers are AG_BAD).
 * PREMUL_SUM multiplies each input by factor first (floats only). out may be one of the inputs, or overlap none. */
int32_t ag_reduce(void *out, const void *const *inputs, int32_t num_inputs, int64_t count, int32_t dtype, int32_t operation, double factor);

/* Sum by a program in postfix order: a value i >= 0 pushes inputs[i], -1 adds the two topmost. One pass over memory: blocks small enough for
 * the first-level cache go through the whole program. inputs are of dtype (F32, BF16 or F16), out is f32; additions in f32.
 * At most 64 values deep. */
int32_t ag_reduce_tree(float *out, const void *const *inputs, int32_t num_inputs, const int32_t *program, int32_t program_length,
                       int64_t count, int32_t dtype);

/* ag_reduce_tree of f32 over pages of one flat space: page i is [bounds[2i], bounds[2i+1]) of out and of every input. squares[i] becomes the sum
 * of the squares of its elements in f64: element j of the page goes to the sum j % AG_SQUARE_LANES, in order of j, then the sums are added in order.
 * The squares of finite elements never overflow. Large outputs go past the caches. */
#define AG_SQUARE_LANES 16
int32_t ag_reduce_pages(float *out, const void *const *inputs, int32_t num_inputs, const int32_t *program, int32_t program_length,
                        const int64_t *bounds, int32_t num_pages, double *squares);

/* Copy and continue a CRC32C over the bytes; dst may be NULL (checksum alone). crc of nothing is 0, as in the usual libraries. */
uint32_t ag_copy_crc32c(void *dst, const void *src, int64_t num_bytes, uint32_t crc);

/* CRC32Cs of the cells of a matrix of bytes: rows of num_bands bands of band_bytes (more than 0) each, without gaps; a cell is one band of rows_per_cell
 * rows, the last one of what is left, its bytes row after row. out has num_bands entries per row of cells. */
void ag_crc32c_cells(const void *src, int64_t num_rows, int64_t band_bytes, int32_t num_bands, int64_t rows_per_cell, uint32_t *out);

/* Bytes of a block that are part of a matrix as ag_crc32c_cells has it. */
typedef struct {
    int64_t at, num_bytes; /* in the block; more than 0 */
    int64_t start;         /* of the first of them in the matrix */
    int64_t num_rows, band_bytes, num_bands, rows_per_cell;
    int64_t first_cell; /* where the stretch's cells begin in the output */
} ag_stretch;

/* Bytes of a block that lie together. */
typedef struct {
    const void *from;
    int64_t num_bytes;
} ag_piece;

/* In one pass the linear CRC32Cs (against those of as many zeros) of each chunk of a block, and of each cell that a stretch has bytes of: the rest
 * of such a cell counts as zeros. The block is its pieces one after another; they are brought together at dst, past the caches, unless it is NULL:
 * each byte is read once, so that the sums are of what is there. Stretches in their order in the block, which do not overlap; chunks and cells,
 * num_bands for each row of cells that a stretch touches, must be 0. */
void ag_gather_crc32c(void *dst, const ag_piece *pieces, int32_t num_pieces, int64_t chunk_bytes, uint32_t *chunks, const ag_stretch *stretches,
                      int32_t num_stretches, uint32_t *cells);

/* Count the elements in which a and b differ (as bytes, element_bytes 1, 2, 4 or 8) and write the first `capacity` of their indices. */
int64_t ag_changed(const void *a, const void *b, int64_t count, int32_t element_bytes, int64_t *indices, int64_t capacity);

/* 64-bit compare-and-swap with acquire-release on a shared word; 1 when it was done. */
int32_t ag_compare_and_swap(_Atomic uint64_t *word, uint64_t expected, uint64_t desired);

/* 64-bit store with release and load with acquire, for headers that are set last. */
void ag_store(_Atomic uint64_t *word, uint64_t value);
uint64_t ag_load(_Atomic uint64_t *word);

#endif
