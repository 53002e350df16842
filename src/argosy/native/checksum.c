/* CRC32C (Castagnoli) of bytes, with the copy made on the way.
 *
 * The instruction takes three cycles but one can start in each: three lanes of a block run side by side and are joined by multiplying with
 * powers of x modulo the polynomial, read from tables. Without the instruction eight tables take eight bytes at a time.
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
#elif defined(__aarch64__)
#if defined(__clang__)
#define HARDWARE __attribute__((target("crc")))
#else
#define HARDWARE __attribute__((target("+crc")))
#endif
#include <arm_acle.h>
#define STEP_8(crc, value) __crc32cd((crc), (value))
#define STEP_1(crc, value) __crc32cb((crc), (value))
#endif

#define POLYNOMIAL 0x82f63b78u /* bits reversed */

enum { LANE_BYTES = 1024, AHEAD_BYTES = 6 * LANE_BYTES, COPY_BYTES = 32768 };

static uint32_t by_bytes[8][256]; /* what a byte contributes from 0 to 7 bytes before the end */
static uint32_t by_lane[4][256];  /* the effect of LANE_BYTES zero bytes on each byte of a crc */
static pthread_once_t are_made = PTHREAD_ONCE_INIT;

static uint32_t over_zeros(uint32_t crc, int num_bytes)
{
    for (int i = 0; i < num_bytes; i++)
        crc = (crc >> 8) ^ by_bytes[0][crc & 0xff];
    return crc;
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
        for (int byte = 0; byte < 256; byte++)
            by_bytes[distance][byte] = over_zeros(by_bytes[distance - 1][byte], 1);
    for (int place = 0; place < 4; place++)
        for (uint32_t byte = 0; byte < 256; byte++)
            by_lane[place][byte] = over_zeros(byte << (8 * place), LANE_BYTES);
}

static uint64_t word_at(const unsigned char *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint32_t by_table(const unsigned char *from, int64_t num_bytes, uint32_t crc)
{
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
static uint32_t past_a_lane(uint32_t crc)
{
    return by_lane[0][crc & 0xff] ^ by_lane[1][(crc >> 8) & 0xff] ^ by_lane[2][(crc >> 16) & 0xff] ^ by_lane[3][crc >> 24];
}

HARDWARE static uint32_t by_instruction(const unsigned char *from, int64_t num_bytes, uint32_t crc)
{
    for (; num_bytes >= 3 * LANE_BYTES; num_bytes -= 3 * LANE_BYTES, from += 3 * LANE_BYTES) {
        uint32_t second = 0, third = 0;
        for (int i = 0; i < LANE_BYTES; i += 8) {
            /* Three lanes at once are more than the CPU's own prefetcher follows. A hint past the end of the data does no harm. */
            if (i % 64 == 0) {
                __builtin_prefetch(from + AHEAD_BYTES + i);
                __builtin_prefetch(from + AHEAD_BYTES + LANE_BYTES + i);
                __builtin_prefetch(from + AHEAD_BYTES + 2 * LANE_BYTES + i);
            }
            crc = STEP_8(crc, word_at(from + i));
            second = STEP_8(second, word_at(from + LANE_BYTES + i));
            third = STEP_8(third, word_at(from + 2 * LANE_BYTES + i));
        }
        crc = past_a_lane(past_a_lane(crc) ^ second) ^ third;
    }
    for (; num_bytes >= 8; num_bytes -= 8, from += 8)
        crc = STEP_8(crc, word_at(from));
    for (; num_bytes > 0; num_bytes--, from++)
        crc = STEP_1(crc, *from);
    return crc;
}

/* Four neighbouring bands side by side: each is too short for lanes of its own. */
HARDWARE static void four_bands(const unsigned char *from, int64_t band_bytes, uint32_t *crcs)
{
    uint32_t a = ~crcs[0], b = ~crcs[1], c = ~crcs[2], d = ~crcs[3];
    const unsigned char *second = from + band_bytes, *third = second + band_bytes, *fourth = third + band_bytes;
    int64_t i = 0;
    for (; i + 8 <= band_bytes; i += 8) {
        a = STEP_8(a, word_at(from + i));
        b = STEP_8(b, word_at(second + i));
        c = STEP_8(c, word_at(third + i));
        d = STEP_8(d, word_at(fourth + i));
    }
    for (; i < band_bytes; i++) {
        a = STEP_1(a, from[i]);
        b = STEP_1(b, second[i]);
        c = STEP_1(c, third[i]);
        d = STEP_1(d, fourth[i]);
    }
    crcs[0] = ~a, crcs[1] = ~b, crcs[2] = ~c, crcs[3] = ~d;
}
#endif

static uint32_t advance(const unsigned char *from, int64_t num_bytes, uint32_t crc)
{
#if defined(HARDWARE)
    if (ag_level() >= AG_CRC)
        return by_instruction(from, num_bytes, crc);
#endif
    return by_table(from, num_bytes, crc);
}

uint32_t ag_copy_crc32c(void *dst, const void *src, int64_t num_bytes, uint32_t crc)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    pthread_once(&are_made, make_tables);
    crc = ~crc;
    if (to == NULL)
        return ~(num_bytes > 0 ? advance(from, num_bytes, crc) : crc);
    /* Piece by piece, so that what is copied comes from the cache that the checksum has just filled. What is summed is what was copied. */
    for (int64_t done = 0; done < num_bytes; done += COPY_BYTES) {
        int64_t n = num_bytes - done < COPY_BYTES ? num_bytes - done : COPY_BYTES;
        memcpy(to + done, from + done, (size_t)n);
        crc = advance(to + done, n, crc);
    }
    return ~crc;
}

void ag_crc32c_cells(const void *src, int64_t num_rows, int64_t band_bytes, int32_t num_bands, int64_t rows_per_cell, uint32_t *out)
{
    const unsigned char *from = src;
    pthread_once(&are_made, make_tables);
    for (int64_t row = 0; row < num_rows; row++) {
        uint32_t *cells = out + row / rows_per_cell * num_bands;
        if (row % rows_per_cell == 0)
            memset(cells, 0, (size_t)num_bands * sizeof *cells);
        int32_t band = 0;
#if defined(HARDWARE)
        for (; band + 4 <= num_bands && band_bytes < 3 * LANE_BYTES && ag_level() >= AG_CRC; band += 4, from += 4 * band_bytes)
            four_bands(from, band_bytes, cells + band);
#endif
        for (; band < num_bands; band++, from += band_bytes)
            cells[band] = ~advance(from, band_bytes, ~cells[band]);
    }
}
