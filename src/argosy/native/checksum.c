/* CRC32C (Castagnoli) of bytes: of a run with the copy made on the way, of the cells of a matrix, of a block's chunks and cells in one pass,
 * which may bring the block together from where it lies.
 *
 * The instruction takes three cycles but one can start in each: four lanes go side by side, short ones, so that memory is read nearly in order.
 * A CRC is linear: what is found of some bytes by themselves is moved past what follows them, by tables of what zero bytes do, and added. So one
 * look at the bytes serves every sum they are part of. Without the instruction eight tables take eight bytes at a time.
 */
#include "kernels.h"
#include "paths.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HARDWARE __attribute__((target("sse4.2")))
#define STEP_8(crc, value) ((uint32_t)_mm_crc32_u64((crc), (value)))
#define STEP_1(crc, value) _mm_crc32_u8((crc), (value))
#define PUT_8(to, value) _mm_stream_si64((long long *)(void *)(to), (long long)(value)) /* past the caches */
#elif defined(__aarch64__)
#if defined(__clang__)
#define HARDWARE __attribute__((target("crc")))
#else
#define HARDWARE __attribute__((target("+crc")))
#endif
#include <arm_acle.h>
#define STEP_8(crc, value) __crc32cd((crc), (value))
#define STEP_1(crc, value) __crc32cb((crc), (value))
#define PUT_8(to, value) memcpy((to), &(uint64_t){value}, 8)
#endif

#define POLYNOMIAL 0x82f63b78u /* bits reversed */

enum { LANE_BITS = 7, SHORT_LANE_BITS = 5, ZERO_BITS = 24, LINE_BYTES = 64, AHEAD_BYTES = 4096, COPY_BYTES = 32768 };

typedef struct {
    uint32_t of[4][256]; /* where each byte of a crc is after some number of zero bytes */
} moving;

static uint32_t by_bytes[8][256];  /* what a byte contributes from 0 to 7 bytes before the end */
static moving by_zeros[ZERO_BITS]; /* past 1, 2, 4, ... zero bytes */
static pthread_once_t are_made = PTHREAD_ONCE_INIT;

static uint32_t moved(uint32_t crc, const moving *past)
{
    return past->of[0][crc & 0xff] ^ past->of[1][(crc >> 8) & 0xff] ^ past->of[2][(crc >> 16) & 0xff] ^ past->of[3][crc >> 24];
}

static void make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? (crc >> 1) ^ POLYNOMIAL : crc >> 1;
        by_bytes[0][byte] = crc;
    }
    for (int distance = 1; distance < 8; distance++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = by_bytes[distance - 1][byte];
            by_bytes[distance][byte] = (before >> 8) ^ by_bytes[0][before & 0xff];
        }
    for (int bits = 0; bits < ZERO_BITS; bits++)
        for (int place = 0; place < 4; place++)
            for (uint32_t byte = 0; byte < 256; byte++) {
                uint32_t crc = byte << (8 * place);
                const moving *half = &by_zeros[bits - (bits > 0)];
                by_zeros[bits].of[place][byte] = bits ? moved(moved(crc, half), half) : (crc >> 8) ^ by_bytes[0][crc & 0xff];
            }
}

static uint32_t past_zeros(uint32_t crc, int64_t num_bytes)
{
    for (; num_bytes >= (int64_t)1 << ZERO_BITS; num_bytes -= (int64_t)1 << (ZERO_BITS - 1))
        crc = moved(crc, &by_zeros[ZERO_BITS - 1]);
    for (; num_bytes; num_bytes &= num_bytes - 1)
        crc = moved(crc, &by_zeros[__builtin_ctzll((unsigned long long)num_bytes)]);
    return crc;
}

/* The table that moves past so many zero bytes: one that is there, or made in `own`. */
static const moving *table_past(int64_t num_bytes, moving *own)
{
    if ((num_bytes & (num_bytes - 1)) == 0 && num_bytes < (int64_t)1 << ZERO_BITS)
        return &by_zeros[__builtin_ctzll((unsigned long long)num_bytes)];
    for (int place = 0; place < 4; place++) {
        uint32_t *to = own->of[place];
        to[0] = 0;
        for (uint32_t byte = 1; byte < 256; byte++) {
            uint32_t rest = byte & (byte - 1);
            to[byte] = rest ? to[rest] ^ to[byte ^ rest] : past_zeros(byte << (8 * place), num_bytes);
        }
    }
    return own;
}

static uint64_t word_at(const unsigned char *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint32_t by_table(unsigned char *to, const unsigned char *from, int64_t num_bytes, uint32_t crc)
{
    if (to != NULL)
        from = memcpy(to, from, (size_t)num_bytes);
    for (; num_bytes >= 8; num_bytes -= 8, from += 8) {
        uint32_t low = crc ^ ((uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24);
        crc = by_bytes[7][low & 0xff] ^ by_bytes[6][(low >> 8) & 0xff] ^ by_bytes[5][(low >> 16) & 0xff] ^ by_bytes[4][low >> 24]
            ^ by_bytes[3][from[4]] ^ by_bytes[2][from[5]] ^ by_bytes[1][from[6]] ^ by_bytes[0][from[7]];
    }
    for (; num_bytes > 0; num_bytes--, from++)
        crc = (crc >> 8) ^ by_bytes[0][(crc ^ *from) & 0xff];
    return crc;
}

#if defined(HARDWARE)
#define INLINE static inline __attribute__((always_inline))

/* Whether words can be stored there past the caches. */
static int is_even(const unsigned char *to)
{
    return ((uintptr_t)to & (sizeof(uint64_t) - 1)) == 0;
}

/* Four words of four runs, `step` apart: each is read once, so that what is summed is what is copied. */
HARDWARE INLINE void four_words(unsigned char *to, const unsigned char *from, int64_t at, int64_t step, uint32_t *sums, const int is_copied)
{
    uint64_t a = word_at(from + at), b = word_at(from + at + step), c = word_at(from + at + 2 * step), d = word_at(from + at + 3 * step);
    sums[0] = STEP_8(sums[0], a);
    sums[1] = STEP_8(sums[1], b);
    sums[2] = STEP_8(sums[2], c);
    sums[3] = STEP_8(sums[3], d);
    if (is_copied) {
        PUT_8(to + at, a);
        PUT_8(to + at + step, b);
        PUT_8(to + at + 2 * step, c);
        PUT_8(to + at + 3 * step, d);
    }
}

/* Continue a crc over four lanes of 2^bits bytes. It is added last: nothing waits for the bytes before. */
HARDWARE INLINE uint32_t by_lanes(unsigned char *to, const unsigned char *from, int64_t at, const int bits, uint32_t crc, const int is_copied)
{
    const int64_t lane = (int64_t)1 << bits;
    uint32_t sums[4] = {0};
    for (int64_t i = 0; i < 4 * lane; i += LINE_BYTES)
        __builtin_prefetch(from + at + AHEAD_BYTES + i); /* a hint past the end of the data does no harm */
    for (int64_t i = 0; i < lane; i += 8)
        four_words(to, from, at + i, lane, sums, is_copied);
    const moving *past = &by_zeros[bits];
    return moved(moved(moved(moved(crc, past) ^ sums[0], past) ^ sums[1], past) ^ sums[2], past) ^ sums[3];
}

HARDWARE INLINE uint32_t by_words(unsigned char *to, const unsigned char *from, int64_t num_bytes, uint32_t crc, const int is_copied)
{
    int64_t done = 0;
    for (; num_bytes - done >= 4 << LANE_BITS; done += 4 << LANE_BITS)
        crc = by_lanes(to, from, done, LANE_BITS, crc, is_copied);
    for (; num_bytes - done >= 4 << SHORT_LANE_BITS; done += 4 << SHORT_LANE_BITS)
        crc = by_lanes(to, from, done, SHORT_LANE_BITS, crc, is_copied);
    for (; num_bytes - done >= 8; done += 8) {
        uint64_t word = word_at(from + done);
        crc = STEP_8(crc, word);
        if (is_copied)
            PUT_8(to + done, word);
    }
    for (; done < num_bytes; done++) {
        unsigned char byte = from[done];
        crc = STEP_1(crc, byte);
        if (is_copied)
            to[done] = byte;
    }
    return crc;
}

HARDWARE static uint32_t by_instruction(unsigned char *to, const unsigned char *from, int64_t num_bytes, uint32_t crc)
{
    if (to != NULL && is_even(to))
        return by_words(to, from, num_bytes, crc, 1);
    if (to != NULL)
        from = memcpy(to, from, (size_t)num_bytes);
    return by_words(NULL, from, num_bytes, crc, 0);
}

HARDWARE INLINE void four_by_words(unsigned char *to, const unsigned char *from, int64_t run_bytes, uint32_t *found, const int is_copied)
{
    uint32_t sums[4] = {0};
    int64_t i = 0;
    for (int64_t ahead = 0; ahead < 4 * run_bytes; ahead += LINE_BYTES)
        __builtin_prefetch(from + AHEAD_BYTES + ahead);
    for (; i + 8 <= run_bytes; i += 8)
        four_words(to, from, i, run_bytes, sums, is_copied);
    for (; i < run_bytes; i++)
        for (int run = 0; run < 4; run++) {
            unsigned char byte = from[run * run_bytes + i];
            sums[run] = STEP_1(sums[run], byte);
            if (is_copied)
                to[run * run_bytes + i] = byte;
        }
    memcpy(found, sums, sizeof sums);
}

/* Four neighbouring runs of equal length, each by itself: nothing is joined. */
HARDWARE static void four_by_instruction(unsigned char *to, const unsigned char *from, int64_t run_bytes, uint32_t *found)
{
    if (to != NULL && is_even(to) && run_bytes % 8 == 0) {
        four_by_words(to, from, run_bytes, found, 1);
        return;
    }
    if (to != NULL)
        from = memcpy(to, from, (size_t)(4 * run_bytes));
    four_by_words(NULL, from, run_bytes, found, 0);
}
#endif

/* Continues a crc, and copies the bytes on the way when there is a place for them. */
typedef uint32_t (*summing)(unsigned char *to, const unsigned char *from, int64_t num_bytes, uint32_t crc);

/* What continues a crc, without the inversions at its ends, on the path in force. */
static summing prepared(void)
{
    pthread_once(&are_made, make_tables);
#if defined(HARDWARE)
    if (ag_level() >= AG_CRC)
        return by_instruction;
#endif
    return by_table;
}

uint32_t ag_copy_crc32c(void *dst, const void *src, int64_t num_bytes, uint32_t crc)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    summing advance = prepared();
    crc = ~crc;
    if (to == NULL)
        return ~(num_bytes > 0 ? advance(NULL, from, num_bytes, crc) : crc);
    /* Piece by piece, so that what is summed comes from the cache that the copy has just filled: whoever asked for it reads the copy next. */
    for (int64_t done = 0; done < num_bytes; done += COPY_BYTES) {
        int64_t n = num_bytes - done < COPY_BYTES ? num_bytes - done : COPY_BYTES;
        memcpy(to + done, from + done, (size_t)n);
        crc = advance(NULL, to + done, n, crc);
    }
    return ~crc;
}

void ag_crc32c_cells(const void *src, int64_t num_rows, int64_t band_bytes, int32_t num_bands, int64_t rows_per_cell, uint32_t *out)
{
    const unsigned char *from = src;
    summing advance = prepared();
    int64_t num_cells = (num_rows + rows_per_cell - 1) / rows_per_cell * num_bands;
    memset(out, 0xff, (size_t)num_cells * sizeof *out);
    for (int64_t row = 0; row < num_rows; row++) {
        uint32_t *cells = out + row / rows_per_cell * num_bands;
        for (int32_t band = 0; band < num_bands; band++, from += band_bytes)
            cells[band] = advance(NULL, from, band_bytes, cells[band]);
    }
    for (int64_t cell = 0; cell < num_cells; cell++)
        out[cell] = ~out[cell];
}

/* The chunks of a block, filled from the first on. */
typedef struct {
    const unsigned char *from; /* the next byte, and where it goes if it is copied */
    unsigned char *to;
    const ag_piece *next;
    int64_t done, stop; /* of the block's bytes: what is summed, and where the chunk under way ends */
    int64_t held;       /* where the piece under way ends */
    int64_t num_bytes, chunk_bytes;
    uint32_t *out;
    summing advance;
} block;

/* How many of the bytes before `until` can be taken at once. */
static int64_t at_once(const block *all, int64_t until)
{
    int64_t stop = all->stop < all->held ? all->stop : all->held;
    return (until < stop ? until : stop) - all->done;
}

static void open_piece(block *all)
{
    while (all->done == all->held && all->done < all->num_bytes) {
        all->from = all->next->from;
        all->held += all->next->num_bytes;
        all->next++;
    }
}

static void go_on(block *all, int64_t num_bytes)
{
    all->done += num_bytes, all->from += num_bytes;
    if (all->to != NULL)
        all->to += num_bytes;
    if (all->done == all->stop) {
        all->out++;
        all->stop += all->chunk_bytes < all->num_bytes - all->stop ? all->chunk_bytes : all->num_bytes - all->stop;
    }
    open_piece(all);
}

static void add_plain(block *all, int64_t until)
{
    while (all->done < until) {
        int64_t n = at_once(all, until);
        *all->out = all->advance(all->to, all->from, n, *all->out);
        go_on(all, n);
    }
}

/* Whole bands, each by itself: four of them when they are too short for lanes. How many. */
static int64_t sum_bands(const block *all, int64_t band_bytes, int64_t most, uint32_t *found)
{
#if defined(HARDWARE)
    if (most >= 4 && band_bytes < 4 << LANE_BITS && all->advance == by_instruction) {
        four_by_instruction(all->to, all->from, band_bytes, found);
        return 4;
    }
#else
    (void)most;
#endif
    found[0] = all->advance(all->to, all->from, band_bytes, 0);
    return 1;
}

static void add_stretch(block *all, const ag_stretch *one, uint32_t *cells)
{
    moving own;
    const moving *past_band = table_past(one->band_bytes, &own);
    const int64_t band_bytes = one->band_bytes, num_bands = one->num_bands, stop = one->at + one->num_bytes;
    int64_t row = one->start / (band_bytes * num_bands), inside = one->start % band_bytes;
    int64_t band = one->start / band_bytes % num_bands;
    while (all->done < stop) {
        int64_t left = at_once(all, stop);
        uint32_t *chunk = all->out;
        if (inside == 0 && left >= band_bytes) {
            uint32_t found[4];
            int64_t most = left / band_bytes < num_bands - band ? left / band_bytes : num_bands - band;
            int64_t count = sum_bands(all, band_bytes, most, found);
            for (int64_t i = 0; i < count; i++) {
                *chunk = moved(*chunk, past_band) ^ found[i];
                cells[band + i] = moved(cells[band + i], past_band) ^ found[i];
            }
            go_on(all, count * band_bytes);
            band += count;
        } else {
            /* What the ends of chunks, pieces and blocks leave of a band. */
            int64_t n = left < band_bytes - inside ? left : band_bytes - inside;
            uint32_t found = all->advance(all->to, all->from, n, 0);
            *chunk = past_zeros(*chunk, n) ^ found;
            cells[band] = past_zeros(cells[band], n) ^ found;
            go_on(all, n);
            inside += n;
            if (inside == band_bytes)
                inside = 0, band++;
        }
        if (band == num_bands) {
            band = 0, row++;
            if (row % one->rows_per_cell == 0)
                cells += num_bands;
        }
    }
    int64_t first = row / one->rows_per_cell * one->rows_per_cell;
    if (row == first && band == 0 && inside == 0)
        return;
    /* What the last cells lack counts as zeros. */
    int64_t last = first + one->rows_per_cell < one->num_rows ? first + one->rows_per_cell : one->num_rows;
    for (int64_t i = 0; i < num_bands; i++) {
        int64_t here = i < band ? band_bytes : i == band ? inside : 0;
        cells[i] = past_zeros(cells[i], (last - row) * band_bytes - here);
    }
}

void ag_gather_crc32c(void *dst, const ag_piece *pieces, int32_t num_pieces, int64_t chunk_bytes, uint32_t *chunks, const ag_stretch *stretches,
                      int32_t num_stretches, uint32_t *cells)
{
    block all = {.to = dst, .next = pieces, .chunk_bytes = chunk_bytes, .out = chunks, .advance = prepared()};
    for (int32_t i = 0; i < num_pieces; i++)
        all.num_bytes += pieces[i].num_bytes;
    all.stop = chunk_bytes < all.num_bytes ? chunk_bytes : all.num_bytes;
    open_piece(&all);
    for (int32_t i = 0; i < num_stretches; i++) {
        add_plain(&all, stretches[i].at);
        add_stretch(&all, &stretches[i], cells + stretches[i].first_cell);
    }
    add_plain(&all, all.num_bytes);
#if defined(__x86_64__)
    if (dst != NULL)
        _mm_sfence();
#endif
}
