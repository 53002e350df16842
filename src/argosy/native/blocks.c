/* The loops themselves, written once and compiled for every path: the compiler's vectorizer does the rest.
 *
 * A loop here never changes the order of floating-point operations and is never contracted (-ffp-contract=off), so a wider path has the
 * same bits. Only f16 has instructions of its own (F16C); the plain conversions beside them are exact and give the same bits too.
 */
#include "blocks.h"
#include "kernels.h"
#include "paths.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,f16c")))
#endif

#define INLINE static inline __attribute__((always_inline))

/* out may be one of the inputs: equal index only, so nothing is carried from one iteration to the next. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Elements at any address: a slot in a file or a message owes us no alignment. */
#define LOOSE __attribute__((aligned(1), may_alias))
typedef float LOOSE f32;
typedef double LOOSE f64;
typedef uint8_t LOOSE u8;
typedef int8_t LOOSE i8;
typedef int16_t LOOSE i16;
typedef int32_t LOOSE i32;
typedef int64_t LOOSE i64;
typedef uint16_t LOOSE u16;

#define FOLD_LOOPS(NAME, T, V, OP)                                                                  \
    INLINE void NAME(void *to, const void *const *in, int n, int64_t count)                         \
    {                                                                                               \
        T *out = to;                                                                                \
        const T *a = in[0], *b = in[1];                                                             \
        if (n == 2) {                                                                               \
            INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = OP(V, a[i], b[i]);             \
        } else if (n == 3) {                                                                        \
            const T *c = in[2];                                                                     \
            INDEPENDENT for (int64_t i = 0; i < count; i++)                                         \
            {                                                                                       \
                V x = OP(V, a[i], b[i]);                                                            \
                out[i] = OP(V, x, c[i]);                                                            \
            }                                                                                       \
        } else {                                                                                    \
            const T *c = in[2], *d = in[3];                                                         \
            INDEPENDENT for (int64_t i = 0; i < count; i++)                                         \
            {                                                                                       \
                V x = OP(V, a[i], b[i]);                                                            \
                V y = OP(V, x, c[i]);                                                               \
                out[i] = OP(V, y, d[i]);                                                            \
            }                                                                                       \
        }                                                                                           \
    }

#define ADD(V, x, y) ((V)((V)(x) + (V)(y)))
#define MULTIPLY(V, x, y) ((V)((V)(x) * (V)(y)))
/* The sums of small integers are made in unsigned arithmetic: wrap-around without undefined behaviour. */
#define ADD_INT(V, x, y) ((V)((uint64_t)(x) + (uint64_t)(y)))
#define ADD_SMALL(V, x, y) ((V)((uint32_t)(x) + (uint32_t)(y)))
#define MULTIPLY_INT(V, x, y) ((V)((uint64_t)(x) * (uint64_t)(y)))
#define MULTIPLY_SMALL(V, x, y) ((V)((uint32_t)(x) * (uint32_t)(y)))
#define LEAST(V, x, y) ((V)(y) < (V)(x) ? (V)(y) : (V)(x))
#define MOST(V, x, y) ((V)(y) > (V)(x) ? (V)(y) : (V)(x))
/* NaN wins from either side; of equal values (the two zeros) the first stays. */
#define LEAST_FLOAT(V, x, y) ((V)(y) < (V)(x) || (V)(y) != (V)(y) ? (V)(y) : (V)(x))
#define MOST_FLOAT(V, x, y) ((V)(y) > (V)(x) || (V)(y) != (V)(y) ? (V)(y) : (V)(x))

FOLD_LOOPS(sum_f32, f32, float, ADD)
FOLD_LOOPS(min_f32, f32, float, LEAST_FLOAT)
FOLD_LOOPS(max_f32, f32, float, MOST_FLOAT)
FOLD_LOOPS(product_f32, f32, float, MULTIPLY)
FOLD_LOOPS(sum_f64, f64, double, ADD)
FOLD_LOOPS(min_f64, f64, double, LEAST_FLOAT)
FOLD_LOOPS(max_f64, f64, double, MOST_FLOAT)
FOLD_LOOPS(product_f64, f64, double, MULTIPLY)
FOLD_LOOPS(sum_u8, u8, uint8_t, ADD_SMALL)
FOLD_LOOPS(min_u8, u8, uint8_t, LEAST)
FOLD_LOOPS(max_u8, u8, uint8_t, MOST)
FOLD_LOOPS(product_u8, u8, uint8_t, MULTIPLY_SMALL)
FOLD_LOOPS(sum_i8, i8, int8_t, ADD_SMALL)
FOLD_LOOPS(min_i8, i8, int8_t, LEAST)
FOLD_LOOPS(max_i8, i8, int8_t, MOST)
FOLD_LOOPS(product_i8, i8, int8_t, MULTIPLY_SMALL)
FOLD_LOOPS(sum_i16, i16, int16_t, ADD_SMALL)
FOLD_LOOPS(min_i16, i16, int16_t, LEAST)
FOLD_LOOPS(max_i16, i16, int16_t, MOST)
FOLD_LOOPS(product_i16, i16, int16_t, MULTIPLY_SMALL)
FOLD_LOOPS(sum_i32, i32, int32_t, ADD_SMALL)
FOLD_LOOPS(min_i32, i32, int32_t, LEAST)
FOLD_LOOPS(max_i32, i32, int32_t, MOST)
FOLD_LOOPS(product_i32, i32, int32_t, MULTIPLY_SMALL)
FOLD_LOOPS(sum_i64, i64, int64_t, ADD_INT)
FOLD_LOOPS(min_i64, i64, int64_t, LEAST)
FOLD_LOOPS(max_i64, i64, int64_t, MOST)
FOLD_LOOPS(product_i64, i64, int64_t, MULTIPLY_INT)

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void widen_bf16(float *out, const void *from, int64_t count)
{
    const u16 *in = from;
    INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = float_of((uint32_t)in[i] << 16);
}

INLINE void narrow_bf16(void *to, const float *in, int64_t count)
{
    u16 *out = to;
    INDEPENDENT for (int64_t i = 0; i < count; i++)
    {
        uint32_t bits = bits_of(in[i]);
        uint32_t nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        uint32_t quiet_nan = (bits >> 16) | 0x40u;
        /* Signed comparison: both sides are below 2^31, and it is the one that every vector unit has. */
        out[i] = (uint16_t)((int32_t)(bits & 0x7fffffffu) > 0x7f800000 ? quiet_nan : nearest_even);
    }
}

INLINE float float_of_half(uint32_t half)
{
    int32_t magnitude = (int32_t)(half & 0x7fffu);
    uint32_t sign = (half & 0x8000u) << 16;
    uint32_t bits = ((uint32_t)magnitude << 13) + (112u << 23);
    /* Infinity and NaN carry the largest exponent in either format; a NaN comes out quiet. */
    bits += magnitude >= 0x7c00 ? 112u << 23 : 0;
    bits |= magnitude > 0x7c00 ? 1u << 22 : 0;
    /* Subnormals are whole multiples of 2^-24; made from integers they survive a CPU that flushes f32 subnormals. */
    uint32_t small = bits_of((float)magnitude * 0x1p-24f);
    return float_of(sign | (magnitude < 0x400 ? small : bits));
}

INLINE uint32_t half_of_float(float value)
{
    uint32_t all = bits_of(value);
    int32_t magnitude = (int32_t)(all & 0x7fffffffu);
    uint32_t rebased = (uint32_t)magnitude - (112u << 23);
    uint32_t normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
    /* Next to 0.5 the last place of f32 is 2^-24, the one subnormals have: the addition rounds for us. */
    uint32_t small = bits_of(float_of((uint32_t)magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t nan = 0x7e00u | (((uint32_t)magnitude >> 13) & 0x3ffu);
    uint32_t half = magnitude < 0x38800000 ? small : normal;
    half = magnitude >= 0x477ff000 ? 0x7c00u : half; /* 65520 and above round to infinity */
    half = magnitude > 0x7f800000 ? nan : half;
    return half | ((all >> 16) & 0x8000u);
}

INLINE void widen_f16(float *out, const void *from, int64_t count)
{
    const u16 *in = from;
    INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = float_of_half(in[i]);
}

INLINE void narrow_f16(void *to, const float *in, int64_t count)
{
    u16 *out = to;
    INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = (uint16_t)half_of_float(in[i]);
}

INLINE void scale_f32(float *out, const void *from, float factor, int64_t count)
{
    const f32 *in = from;
    INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = in[i] * factor;
}

INLINE void scale_f64(double *out, const void *from, double factor, int64_t count)
{
    const f64 *in = from;
    INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = in[i] * factor;
}

INLINE void divide_f32(void *to, const float *in, float divisor, int64_t count)
{
    f32 *out = to;
    INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = in[i] / divisor;
}

INLINE void divide_f64(void *to, const double *in, double divisor, int64_t count)
{
    f64 *out = to;
    INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = in[i] / divisor;
}

INLINE void pairs_f32(float *to, const void *const *in, int64_t count)
{
    f32 *out = to;
    const f32 *a = in[0], *b = in[1], *c = in[2], *d = in[3];
    INDEPENDENT for (int64_t i = 0; i < count; i++)
    {
        float left = a[i] + b[i];
        float right = c[i] + d[i];
        out[i] = left + right;
    }
}

/* Element i goes to lane i % AG_SQUARE_LANES; a lane is added in order of i. */
INLINE void squares_f32(double *lanes, const float *in, int64_t count)
{
    double sums[AG_SQUARE_LANES];
    memcpy(sums, lanes, sizeof sums);
    int64_t whole = count - count % AG_SQUARE_LANES;
    for (int64_t i = 0; i < whole; i += AG_SQUARE_LANES)
        for (int lane = 0; lane < AG_SQUARE_LANES; lane++) {
            double wide = in[i + lane];
            sums[lane] += wide * wide;
        }
    for (int64_t i = whole; i < count; i++) {
        double wide = in[i];
        sums[i - whole] += wide * wide;
    }
    memcpy(lanes, sums, sizeof sums);
}

INLINE void stream_f32(float *to, const float *in, int64_t count)
{
    memcpy(to, in, (size_t)count * sizeof *in);
}

INLINE void fence(void) {}

#if defined(__x86_64__)
/* The sum is read again only after all ranks have voted: without a place in the caches it costs no read before the write. */
AVX2 static void stream_f32_past_caches(float *to, const float *in, int64_t count)
{
    int64_t i = 0;
    for (; i < count && ((uintptr_t)(to + i) & 31) != 0; i++)
        to[i] = in[i];
    for (; i + 8 <= count; i += 8)
        _mm256_stream_ps(to + i, _mm256_loadu_ps(in + i));
    for (; i < count; i++)
        to[i] = in[i];
}

/* Streamed stores are ordered by nothing else: what follows may be a release of a word. */
static void store_fence(void)
{
    _mm_sfence();
}

AVX2 static void widen_f16_by_instruction(float *out, const void *from, int64_t count)
{
    const u16 *in = from;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
    for (; i < count; i++)
        out[i] = float_of_half(in[i]);
}

AVX2 static void narrow_f16_by_instruction(void *to, const float *in, int64_t count)
{
    u16 *out = to;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < count; i++)
        out[i] = (uint16_t)half_of_float(in[i]);
}
#endif

#if defined(__x86_64__)
AVX2 static inline __m256i nearest_bf16(const float *in)
{
    __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(in));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000)));
}

/* By hand, since the compiler's own packing of 32 to 16 bits takes twice the time. */
AVX2 static void narrow_bf16_by_hand(void *to, const float *in, int64_t count)
{
    u16 *out = to;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256i packed = _mm256_packus_epi32(nearest_bf16(in + i), nearest_bf16(in + i + 8));
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    narrow_bf16(out + i, in + i, count - i);
}
#endif

/* One real function per path for each loop above. */
#define ON_PATH(PATH, TARGET, NAME, PARAMETERS, ARGUMENTS) \
    TARGET static void PATH##_##NAME PARAMETERS { NAME ARGUMENTS; }
#define FOLD_ON_PATH(PATH, TARGET, NAME) \
    ON_PATH(PATH, TARGET, NAME, (void *out, const void *const *in, int n, int64_t count), (out, in, n, count))
#define FOLDS_ON_PATH(PATH, TARGET, TYPE)       \
    FOLD_ON_PATH(PATH, TARGET, sum_##TYPE)      \
    FOLD_ON_PATH(PATH, TARGET, min_##TYPE)      \
    FOLD_ON_PATH(PATH, TARGET, max_##TYPE)      \
    FOLD_ON_PATH(PATH, TARGET, product_##TYPE)
#define ALL_ON_PATH(PATH, TARGET)                                                                                                      \
    FOLDS_ON_PATH(PATH, TARGET, f32)                                                                                                   \
    FOLDS_ON_PATH(PATH, TARGET, f64)                                                                                                   \
    FOLDS_ON_PATH(PATH, TARGET, u8)                                                                                                    \
    FOLDS_ON_PATH(PATH, TARGET, i8)                                                                                                    \
    FOLDS_ON_PATH(PATH, TARGET, i16)                                                                                                   \
    FOLDS_ON_PATH(PATH, TARGET, i32)                                                                                                   \
    FOLDS_ON_PATH(PATH, TARGET, i64)                                                                                                   \
    ON_PATH(PATH, TARGET, widen_bf16, (float *out, const void *in, int64_t count), (out, in, count))                                   \
    ON_PATH(PATH, TARGET, scale_f32, (float *out, const void *in, float factor, int64_t count), (out, in, factor, count))              \
    ON_PATH(PATH, TARGET, scale_f64, (double *out, const void *in, double factor, int64_t count), (out, in, factor, count))            \
    ON_PATH(PATH, TARGET, divide_f32, (void *out, const float *in, float divisor, int64_t count), (out, in, divisor, count))           \
    ON_PATH(PATH, TARGET, divide_f64, (void *out, const double *in, double divisor, int64_t count), (out, in, divisor, count))         \
    ON_PATH(PATH, TARGET, squares_f32, (double *lanes, const float *in, int64_t count), (lanes, in, count))                            \
    ON_PATH(PATH, TARGET, pairs_f32, (float *out, const void *const *in, int64_t count), (out, in, count))
#define FOLD_ROW(PATH, TYPE) {PATH##_sum_##TYPE, PATH##_min_##TYPE, PATH##_max_##TYPE, PATH##_product_##TYPE}
#define TABLE(PATH, WIDEN_F16, NARROW_F16, NARROW_BF16, STREAM, FENCE)                                                                           \
    static const ag_blocks PATH##_blocks = {                                                                         \
        .fold = {FOLD_ROW(PATH, f32), FOLD_ROW(PATH, f64), FOLD_ROW(PATH, u8), FOLD_ROW(PATH, i8),                   \
                 FOLD_ROW(PATH, i16), FOLD_ROW(PATH, i32), FOLD_ROW(PATH, i64)},                                     \
        .widen_bf16 = PATH##_widen_bf16, .widen_f16 = WIDEN_F16,                                                     \
        .narrow_bf16 = NARROW_BF16, .narrow_f16 = NARROW_F16,                                                 \
        .scale_f32 = PATH##_scale_f32, .scale_f64 = PATH##_scale_f64,                                                \
        .divide_f32 = PATH##_divide_f32, .divide_f64 = PATH##_divide_f64, .pairs_f32 = PATH##_pairs_f32,                 \
        .squares_f32 = PATH##_squares_f32, .stream_f32 = STREAM, .fence = FENCE};

ALL_ON_PATH(plain, )
ON_PATH(plain, , widen_f16, (float *out, const void *in, int64_t count), (out, in, count))
ON_PATH(plain, , narrow_bf16, (void *out, const float *in, int64_t count), (out, in, count))
ON_PATH(plain, , narrow_f16, (void *out, const float *in, int64_t count), (out, in, count))
ON_PATH(plain, , stream_f32, (float *to, const float *in, int64_t count), (to, in, count))
ON_PATH(plain, , fence, (void), ())
TABLE(plain, plain_widen_f16, plain_narrow_f16, plain_narrow_bf16, plain_stream_f32, plain_fence)

#if defined(__x86_64__)
ALL_ON_PATH(avx2, AVX2)
TABLE(avx2, widen_f16_by_instruction, narrow_f16_by_instruction, narrow_bf16_by_hand, stream_f32_past_caches, store_fence)
#endif

const ag_blocks *ag_blocks_now(void)
{
#if defined(__x86_64__)
    if (ag_level() == AG_AVX2)
        return &avx2_blocks;
#endif
    return &plain_blocks;
}
