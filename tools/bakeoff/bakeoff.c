// The layout bake-off on CPUs: planar rows against 16 interleaved rows, one activation row (decode), for Q4_0, Q8_0 and Q4_K.
//
//     gcc -O3 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni bakeoff.c -o bakeoff -lpthread -lm
//     ./bakeoff                            # GB/s in and out of cache, 1 and 2 threads, after a check against plain C
//     ./count.py ./bakeoff                 # instructions a weight in each compiled loop
//     aarch64-linux-gnu-gcc -O3 -march=armv8.2-a+dotprod bakeoff.c -o bakeoff-arm -lpthread -lm && ./count.py ./bakeoff-arm
//
// Planar: a row's groups of 32 columns follow each other, 16 bytes of nibbles (low: columns 0-15) or 32 bytes; then the rows'
// scales. Interleaved: as src/format/layout.rs. Both get the program's activations: 14 bits in two int8 halves. Each planar loop is
// the best that we found for its instruction set; results of both are compared with the same sums in double precision.
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GROUP = 32, TILE = 16, SUPER = 8 };
typedef enum { Q4_0, Q8_0, Q4_K } Codec;
static const char *codec_names[] = {"q4_0", "q8_0", "q4_k"};

// f16 or u8 scales, mins: as the codec has them. `d`, `m` hold f16 a group (Q4_K: a super-block of 8 groups).
typedef struct { uint8_t *codes, *sc, *mn; uint16_t *d, *m; int rows, cols; size_t bytes; } Mat;
// An activation row: halves, and a group's scale, -sum of codes times the offset, scale times sum of codes.
typedef struct { int8_t *high, *low; float *d; int32_t *off; float *sd; } Act;
typedef void Kernel(const Mat *, const Act *, float *y, int row0, int row1);
#define NOINLINE __attribute__((noinline))

#if defined(__x86_64__)
#include <immintrin.h>
#define Z(p) _mm512_loadu_si512(p)
#define Y(p) _mm256_loadu_si256((const __m256i *)(p))
static inline __m512i four_z(const int8_t *x) { int32_t v; memcpy(&v, x, 4); return _mm512_set1_epi32(v); }
static inline __m256i four_y(const int8_t *x) { int32_t v; memcpy(&v, x, 4); return _mm256_set1_epi32(v); }

// AVX-512, interleaved: a register is 16 rows, a lane a row.
#define INTERLEAVED_512(NAME, BYTES, CODE, SCALE, MIN)                                                              \
  NOINLINE void NAME(const Mat *w, const Act *x, float *y, int row0, int row1) {                                    \
    int groups = w->cols / GROUP;                                                                                   \
    const __m512i nib = _mm512_set1_epi8(15);                                                                       \
    (void)nib;                                                                                                      \
    for (int t = row0 / TILE; t < row1 / TILE; t++) {                                                               \
      __m512 acc = _mm512_setzero_ps();                                                                             \
      for (int g = 0; g < groups; g++) {                                                                            \
        const uint8_t *p = w->codes + ((size_t)t * groups + g) * BYTES;                                             \
        for (int l = 0; l < BYTES; l += 64) _mm_prefetch((const char *)p + 4096 + l, _MM_HINT_T0);                  \
        __m512i h = _mm512_setzero_si512(), l = _mm512_set1_epi32(x->off[g]), c[8];                                 \
        CODE;                                                                                                       \
        _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) {                                                       \
          h = _mm512_dpbusd_epi32(h, c[k], four_z(x->high + g * GROUP + 4 * k));                                    \
          l = _mm512_dpbusd_epi32(l, c[k], four_z(x->low + g * GROUP + 4 * k));                                     \
        }                                                                                                           \
        __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(h, 6), l));                              \
        size_t at = ((size_t)t * groups + g) * TILE, sup = ((size_t)t * (groups / SUPER) + g / SUPER) * TILE;       \
        (void)at, (void)sup;                                                                                        \
        acc = _mm512_fmadd_ps(_mm512_mul_ps(SCALE, _mm512_set1_ps(x->d[g])), dot, acc);                             \
        MIN;                                                                                                        \
      }                                                                                                             \
      _mm512_storeu_ps(y + t * TILE, acc);                                                                          \
    }                                                                                                               \
  }
#define F16_Z(p) _mm512_cvtph_ps(Y(p))
#define U8_Z(p) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define NIB_512 _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) { __m512i v = Z(p + 64 * k);                    \
  c[k] = _mm512_and_si512(v, nib); c[k + 4] = _mm512_and_si512(_mm512_srli_epi32(v, 4), nib); }
#define BYTE_512 _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) c[k] = Z(p + 64 * k)
INTERLEAVED_512(avx512_interleaved_q4_0, 256, NIB_512, F16_Z(w->d + at), )
INTERLEAVED_512(avx512_interleaved_q8_0, 512, BYTE_512, F16_Z(w->d + at), )
INTERLEAVED_512(avx512_interleaved_q4_k, 256, NIB_512, _mm512_mul_ps(F16_Z(w->d + sup), U8_Z(w->sc + at)),
                acc = _mm512_fnmadd_ps(_mm512_mul_ps(F16_Z(w->m + sup), U8_Z(w->mn + at)), _mm512_set1_ps(x->sd[g]), acc))

// AVX-512, planar: two groups of one row in a register, eight lanes each.
#define PLANAR_512(NAME, BYTES, CODE, SCALES, MIN)                                                                  \
  NOINLINE void NAME(const Mat *w, const Act *x, float *y, int row0, int row1) {                                    \
    int groups = w->cols / GROUP;                                                                                   \
    const __m512i nib = _mm512_set1_epi8(15), twice = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);                    \
    const __m512i shift = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);                                                \
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);                        \
    (void)nib, (void)twice, (void)shift;                                                                            \
    for (int r = row0; r < row1; r++) {                                                                             \
      __m512 acc = _mm512_setzero_ps();                                                                             \
      __m128 mins = _mm_setzero_ps();                                                                               \
      for (int g = 0; g < groups; g += 2) {                                                                         \
        size_t at = (size_t)r * groups + g, sup = (size_t)r * (groups / SUPER) + g / SUPER;                         \
        (void)sup;                                                                                                  \
        const uint8_t *p = w->codes + at * BYTES;                                                                   \
        _mm_prefetch((const char *)p + 4096, _MM_HINT_T0);                                                          \
        __m512i c = CODE;                                                                                           \
        __m512i h = _mm512_dpbusd_epi32(_mm512_setzero_si512(), c, Z(x->high + g * GROUP));                         \
        /* The offsets of both groups enter by the first lane of each. */                                           \
        __m512i off = _mm512_maskz_permutexvar_epi32(0x0101, lanes,                                                 \
            _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)(x->off + g))));                                \
        __m512i l = _mm512_dpbusd_epi32(off, c, Z(x->low + g * GROUP));                                             \
        __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(h, 6), l));                              \
        __m128 dx = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(x->d + g)));                                 \
        __m128 s = _mm_mul_ps(SCALES, dx);                                                                          \
        acc = _mm512_fmadd_ps(_mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(s)), dot, acc);                   \
        MIN;                                                                                                        \
      }                                                                                                             \
      y[r] = _mm512_reduce_add_ps(acc) - _mm_cvtss_f32(_mm_add_ss(mins, _mm_movehdup_ps(mins)));                    \
    }                                                                                                               \
  }
static inline __m128 two_f16(const uint16_t *p) { int32_t v; memcpy(&v, p, 4); return _mm_cvtph_ps(_mm_cvtsi32_si128(v)); }
static inline __m128 one_f16(const uint16_t *p) { return _mm_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(*p))); }
static inline __m128 two_u8(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(v))); }
#define PNIB_512 _mm512_and_si512(nib, _mm512_srlv_epi64(_mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(Y(p))), shift))
PLANAR_512(avx512_planar_q4_0, 16, PNIB_512, two_f16(w->d + at), )
PLANAR_512(avx512_planar_q8_0, 32, Z(p), two_f16(w->d + at), )
PLANAR_512(avx512_planar_q4_k, 16, PNIB_512, _mm_mul_ps(one_f16(w->d + sup), two_u8(w->sc + at)),
           mins = _mm_fmadd_ps(_mm_mul_ps(one_f16(w->m + sup), two_u8(w->mn + at)),
                               _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(x->sd + g))), mins))

// AVX2: vpmaddubsw saturates at 16 bits; 4-bit codes add eight of them first, 8-bit codes are made signed.
static inline __m256i widen(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }
static inline __m256i dot_u(__m256i c, __m256i x) { return _mm256_maddubs_epi16(c, x); }
static inline __m256i dot_s(__m256i c, __m256i x) { return widen(_mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(x, c))); }
#define INTERLEAVED_256(NAME, BYTES, CODE, DOT, WIDEN, ADD, OFF, SCALE, MIN)                                        \
  NOINLINE void NAME(const Mat *w, const Act *x, float *y, int row0, int row1) {                                    \
    int groups = w->cols / GROUP;                                                                                   \
    const __m256i nib = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(-128);                                        \
    (void)nib, (void)flip;                                                                                          \
    for (int t = row0 / TILE; t < row1 / TILE; t++) {                                                               \
      __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};                                                   \
      for (int g = 0; g < groups; g++) {                                                                            \
        _Pragma("GCC unroll 2") for (int s = 0; s < 2; s++) {                                                       \
          const uint8_t *p = w->codes + ((size_t)t * groups + g) * BYTES + 32 * s;                                  \
          for (int l = 32 * s; l < BYTES; l += 128) _mm_prefetch((const char *)p + 4096 + l, _MM_HINT_T0);          \
          __m256i h = _mm256_setzero_si256(), l = h, c[8];                                                          \
          CODE;                                                                                                     \
          _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) {                                                     \
            h = ADD(h, DOT(c[k], four_y(x->high + g * GROUP + 4 * k)));                                             \
            l = ADD(l, DOT(c[k], four_y(x->low + g * GROUP + 4 * k)));                                              \
          }                                                                                                         \
          __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(WIDEN(h), 6), OFF(WIDEN(l), x->off[g]));                 \
          size_t at = ((size_t)t * groups + g) * TILE + 8 * s;                                                      \
          size_t sup = ((size_t)t * (groups / SUPER) + g / SUPER) * TILE + 8 * s;                                   \
          (void)at, (void)sup;                                                                                      \
          acc[s] = _mm256_fmadd_ps(_mm256_mul_ps(SCALE, _mm256_set1_ps(x->d[g])), _mm256_cvtepi32_ps(sum), acc[s]); \
          MIN;                                                                                                      \
        }                                                                                                           \
      }                                                                                                             \
      _mm256_storeu_ps(y + t * TILE, acc[0]);                                                                       \
      _mm256_storeu_ps(y + t * TILE + 8, acc[1]);                                                                   \
    }                                                                                                               \
  }
#define SAME(v) (v)
#define OFFSET(v, off) _mm256_add_epi32(v, _mm256_set1_epi32(off))
#define NO_OFFSET(v, off) (v)
#define F16_Y(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define U8_Y(p) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define NIB_256 _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) { __m256i v = Y(p + 64 * k);                    \
  c[k] = _mm256_and_si256(v, nib); c[k + 4] = _mm256_and_si256(_mm256_srli_epi32(v, 4), nib); }
#define BYTE_256 _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) c[k] = _mm256_xor_si256(Y(p + 64 * k), flip)
INTERLEAVED_256(avx2_interleaved_q4_0, 256, NIB_256, dot_u, widen, _mm256_add_epi16, OFFSET, F16_Y(w->d + at), )
INTERLEAVED_256(avx2_interleaved_q8_0, 512, BYTE_256, dot_s, SAME, _mm256_add_epi32, NO_OFFSET, F16_Y(w->d + at), )
INTERLEAVED_256(avx2_interleaved_q4_k, 256, NIB_256, dot_u, widen, _mm256_add_epi16, NO_OFFSET,
                _mm256_mul_ps(F16_Y(w->d + sup), U8_Y(w->sc + at)),
                acc[s] = _mm256_fnmadd_ps(_mm256_mul_ps(F16_Y(w->m + sup), U8_Y(w->mn + at)), _mm256_set1_ps(x->sd[g]), acc[s]))

#define PLANAR_256(NAME, BYTES, CODE, DOT, OFF, SCALE, MIN)                                                         \
  NOINLINE void NAME(const Mat *w, const Act *x, float *y, int row0, int row1) {                                    \
    int groups = w->cols / GROUP;                                                                                   \
    const __m256i nib = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(-128), shift = _mm256_setr_epi64x(0, 0, 4, 4);\
    (void)nib, (void)flip, (void)shift;                                                                             \
    for (int r = row0; r < row1; r++) {                                                                             \
      __m256 acc = _mm256_setzero_ps();                                                                             \
      float mins = 0;                                                                                               \
      for (int g = 0; g < groups; g++) {                                                                            \
        size_t at = (size_t)r * groups + g, sup = (size_t)r * (groups / SUPER) + g / SUPER;                         \
        (void)sup;                                                                                                  \
        const uint8_t *p = w->codes + at * BYTES;                                                                   \
        _mm_prefetch((const char *)p + 4096, _MM_HINT_T0);                                                          \
        __m256i c = CODE;                                                                                           \
        __m256i h = DOT(c, Y(x->high + g * GROUP)), l = DOT(c, Y(x->low + g * GROUP));                              \
        __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(h, 6), l);                                                 \
        OFF;                                                                                                        \
        __m256 s = _mm256_mul_ps(SCALE, _mm256_set1_ps(x->d[g]));                                                   \
        acc = _mm256_fmadd_ps(s, _mm256_cvtepi32_ps(sum), acc);                                                     \
        MIN;                                                                                                        \
      }                                                                                                             \
      __m128 v = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));                            \
      v = _mm_add_ps(v, _mm_movehl_ps(v, v));                                                                       \
      y[r] = _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v))) - mins;                                               \
    }                                                                                                               \
  }
#define PNIB_256 _mm256_and_si256(nib, _mm256_srlv_epi64(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)), shift))
#define WIDE_U(c, x) widen(dot_u(c, x))
#define OFF_LANE sum = _mm256_add_epi32(sum, _mm256_zextsi128_si256(_mm_cvtsi32_si128(x->off[g])))
static inline __m256 one_y(uint16_t v) { return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(v))); }
static inline float one_f(uint16_t v) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(v))); }
PLANAR_256(avx2_planar_q4_0, 16, PNIB_256, WIDE_U, OFF_LANE, one_y(w->d[at]), )
PLANAR_256(avx2_planar_q8_0, 32, _mm256_xor_si256(Y(p), flip), dot_s, , one_y(w->d[at]), )
PLANAR_256(avx2_planar_q4_k, 16, PNIB_256, WIDE_U, , _mm256_set1_ps(one_f(w->d[sup]) * w->sc[at]),
           mins += one_f(w->m[sup]) * w->mn[at] * x->sd[g])
static const char *isa_names[] = {"avx512", "avx2"};
static Kernel *kernels[2][3][2] = {
    {{avx512_planar_q4_0, avx512_interleaved_q4_0}, {avx512_planar_q8_0, avx512_interleaved_q8_0}, {avx512_planar_q4_k, avx512_interleaved_q4_k}},
    {{avx2_planar_q4_0, avx2_interleaved_q4_0}, {avx2_planar_q8_0, avx2_interleaved_q8_0}, {avx2_planar_q4_k, avx2_interleaved_q4_k}}};
enum { ISAS = 2 };
static int signed_bytes(int isa) { return isa == 1; }
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
static inline float32x4_t f16_4(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline float32x4_t u8_4(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(v)))));
}
static inline float one_f(uint16_t v) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(v))), 0); }
#define S8(v) vreinterpretq_s8_u8(v)
// NEON: sdot by lane, four rows a register.
#define INTERLEAVED_NEON(NAME, BYTES, CODE, OFF, SCALE, MIN)                                                        \
  NOINLINE void NAME(const Mat *w, const Act *x, float *y, int row0, int row1) {                                    \
    int groups = w->cols / GROUP;                                                                                   \
    const uint8x16_t nib = vdupq_n_u8(15), flip = vdupq_n_u8(128);                                                  \
    (void)nib, (void)flip;                                                                                          \
    for (int t = row0 / TILE; t < row1 / TILE; t++) {                                                               \
      float32x4_t acc[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};                        \
      for (int g = 0; g < groups; g++) {                                                                            \
        int8x16_t xh[2] = {vld1q_s8(x->high + g * GROUP), vld1q_s8(x->high + g * GROUP + 16)};                      \
        int8x16_t xl[2] = {vld1q_s8(x->low + g * GROUP), vld1q_s8(x->low + g * GROUP + 16)};                        \
        _Pragma("GCC unroll 4") for (int s = 0; s < 4; s++) {                                                       \
          const uint8_t *p = w->codes + ((size_t)t * groups + g) * BYTES + 16 * s;                                  \
          __builtin_prefetch(p + 4096 + 64 * s - 16 * s);                                                           \
          int32x4_t h = vdupq_n_s32(0), l = OFF;                                                                    \
          uint8x16_t c[8];                                                                                          \
          CODE;                                                                                                     \
          _Pragma("GCC unroll 2") for (int k = 0; k < 2; k++) {                                                     \
            h = vdotq_laneq_s32(h, S8(c[4 * k]), xh[k], 0), l = vdotq_laneq_s32(l, S8(c[4 * k]), xl[k], 0);         \
            h = vdotq_laneq_s32(h, S8(c[4 * k + 1]), xh[k], 1), l = vdotq_laneq_s32(l, S8(c[4 * k + 1]), xl[k], 1); \
            h = vdotq_laneq_s32(h, S8(c[4 * k + 2]), xh[k], 2), l = vdotq_laneq_s32(l, S8(c[4 * k + 2]), xl[k], 2); \
            h = vdotq_laneq_s32(h, S8(c[4 * k + 3]), xh[k], 3), l = vdotq_laneq_s32(l, S8(c[4 * k + 3]), xl[k], 3); \
          }                                                                                                         \
          float32x4_t dot = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(h, 6), l));                                         \
          size_t at = ((size_t)t * groups + g) * TILE + 4 * s;                                                      \
          size_t sup = ((size_t)t * (groups / SUPER) + g / SUPER) * TILE + 4 * s;                                   \
          (void)at, (void)sup;                                                                                      \
          acc[s] = vfmaq_f32(acc[s], vmulq_n_f32(SCALE, x->d[g]), dot);                                             \
          MIN;                                                                                                      \
        }                                                                                                           \
      }                                                                                                             \
      for (int s = 0; s < 4; s++) vst1q_f32(y + t * TILE + 4 * s, acc[s]);                                          \
    }                                                                                                               \
  }
#define NIB_NEON _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) { uint8x16_t v = vld1q_u8(p + 64 * k);         \
  c[k] = vandq_u8(v, nib); c[k + 4] = vshrq_n_u8(v, 4); }
#define BYTE_NEON _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) c[k] = veorq_u8(vld1q_u8(p + 64 * k), flip)
INTERLEAVED_NEON(neon_interleaved_q4_0, 256, NIB_NEON, vdupq_n_s32(x->off[g]), f16_4(w->d + at), )
INTERLEAVED_NEON(neon_interleaved_q8_0, 512, BYTE_NEON, vdupq_n_s32(0), f16_4(w->d + at), )
INTERLEAVED_NEON(neon_interleaved_q4_k, 256, NIB_NEON, vdupq_n_s32(0), vmulq_f32(f16_4(w->d + sup), u8_4(w->sc + at)),
                 acc[s] = vfmsq_n_f32(acc[s], vmulq_f32(f16_4(w->m + sup), u8_4(w->mn + at)), x->sd[g]))
#define PLANAR_NEON(NAME, BYTES, CODE, OFF, SCALE, MIN)                                                             \
  NOINLINE void NAME(const Mat *w, const Act *x, float *y, int row0, int row1) {                                    \
    int groups = w->cols / GROUP;                                                                                   \
    const uint8x16_t nib = vdupq_n_u8(15), flip = vdupq_n_u8(128);                                                  \
    (void)nib, (void)flip;                                                                                          \
    for (int r = row0; r < row1; r++) {                                                                             \
      float32x4_t acc = vdupq_n_f32(0);                                                                             \
      float mins = 0;                                                                                               \
      for (int g = 0; g < groups; g++) {                                                                            \
        size_t at = (size_t)r * groups + g, sup = (size_t)r * (groups / SUPER) + g / SUPER;                         \
        (void)sup;                                                                                                  \
        const uint8_t *p = w->codes + at * BYTES;                                                                   \
        __builtin_prefetch(p + 4096);                                                                               \
        uint8x16_t c0, c1;                                                                                          \
        CODE;                                                                                                       \
        int32x4_t h = vdotq_s32(vdupq_n_s32(0), S8(c0), vld1q_s8(x->high + g * GROUP)), l = OFF;                    \
        h = vdotq_s32(h, S8(c1), vld1q_s8(x->high + g * GROUP + 16));                                               \
        l = vdotq_s32(l, S8(c0), vld1q_s8(x->low + g * GROUP));                                                     \
        l = vdotq_s32(l, S8(c1), vld1q_s8(x->low + g * GROUP + 16));                                                \
        float32x4_t dot = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(h, 6), l));                                           \
        acc = vfmaq_n_f32(acc, dot, (SCALE) * x->d[g]);                                                             \
        MIN;                                                                                                        \
      }                                                                                                             \
      y[r] = vaddvq_f32(acc) - mins;                                                                                \
    }                                                                                                               \
  }
#define PNIB_NEON uint8x16_t v = vld1q_u8(p); c0 = vandq_u8(v, nib), c1 = vshrq_n_u8(v, 4)
#define PBYTE_NEON c0 = veorq_u8(vld1q_u8(p), flip), c1 = veorq_u8(vld1q_u8(p + 16), flip)
PLANAR_NEON(neon_planar_q4_0, 16, PNIB_NEON, vsetq_lane_s32(x->off[g], vdupq_n_s32(0), 0), one_f(w->d[at]), )
PLANAR_NEON(neon_planar_q8_0, 32, PBYTE_NEON, vdupq_n_s32(0), one_f(w->d[at]), )
PLANAR_NEON(neon_planar_q4_k, 16, PNIB_NEON, vdupq_n_s32(0), one_f(w->d[sup]) * w->sc[at],
            mins += one_f(w->m[sup]) * w->mn[at] * x->sd[g])
static const char *isa_names[] = {"neon"};
static Kernel *kernels[1][3][2] = {
    {{neon_planar_q4_0, neon_interleaved_q4_0}, {neon_planar_q8_0, neon_interleaved_q8_0}, {neon_planar_q4_k, neon_interleaved_q4_k}}};
enum { ISAS = 1 };
static int signed_bytes(int isa) { return isa == 0; }
#endif

static uint32_t state = 12345;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }
static void *memory(size_t bytes) {
  void *p = aligned_alloc(64, (bytes + 8191) / 64 * 64); // prefetches and pairs may look a little past the end
  if (!p) exit(1);
  for (size_t i = 0; i < bytes / 4; i++) ((uint32_t *)p)[i] = next() ^ next() >> 16;
  return p;
}
static int code_bytes(Codec c) { return c == Q8_0 ? 32 : 16; }
static int offset_of(Codec c) { return c == Q4_0 ? 8 : c == Q8_0 ? 128 : 0; }
static float half(uint16_t v) { return ldexpf((v & 1023) + 1024, (v >> 10 & 31) - 25); } // normal, positive

static Mat make(Codec c, int rows, int cols) {
  size_t groups = (size_t)rows * cols / GROUP, scales = c == Q4_K ? groups / SUPER : groups;
  Mat w = {memory(groups * code_bytes(c)), 0, 0, memory(scales * 2), memory(scales * 2), rows, cols, 0};
  w.bytes = groups * code_bytes(c) + scales * (c == Q4_K ? 4 : 2) + (c == Q4_K ? groups * 2 : 0);
  if (c == Q4_K) w.sc = memory(groups), w.mn = memory(groups);
  for (size_t i = 0; i < scales; i++) w.d[i] = 0x2000 | (w.d[i] & 1023), w.m[i] = 0x2000 | (w.m[i] & 1023);
  return w;
}
static Act act(Codec c, int cols, int is_signed) {
  int groups = cols / GROUP;
  Act x = {memory(cols), memory(cols), memory(groups * 4), memory(groups * 4 + 8), memory(groups * 4 + 8)};
  for (int g = 0; g < groups; g++) {
    int sum = 0;
    for (int k = 0; k < GROUP; k++) {
      x.high[g * GROUP + k] = (int)(next() >> 24) - 128 < -127 ? -127 : (int)(next() >> 25) * 2 - 127;
      x.low[g * GROUP + k] = (int)(next() >> 26) - 32;
      sum += 64 * x.high[g * GROUP + k] + x.low[g * GROUP + k];
    }
    x.d[g] = 1e-3f * (1 + (next() & 7));
    x.off[g] = c == Q8_0 && is_signed ? 0 : -sum * offset_of(c);
    x.sd[g] = x.d[g] * sum;
  }
  return x;
}
static double expected(Codec c, const Mat *w, const Act *x, int r, int interleaved, double *size) {
  int groups = w->cols / GROUP;
  double y = 0;
  *size = 0;
  for (int g = 0; g < groups; g++) {
    size_t at = (size_t)r * groups + g, sup = (size_t)r * (groups / SUPER) + g / SUPER, tg = (size_t)(r / TILE) * groups + g;
    if (interleaved) at = tg * TILE + r % TILE, sup = ((size_t)(r / TILE) * (groups / SUPER) + g / SUPER) * TILE + r % TILE;
    double dot = 0;
    for (int k = 0; k < GROUP; k++) {
      size_t byte = c == Q8_0 ? k : k % 16;
      size_t i = interleaved ? tg * 16 * code_bytes(c) + 64 * (byte / 4) + 4 * (r % TILE) + byte % 4 : at * code_bytes(c) + byte;
      int q = c == Q8_0 ? w->codes[i] : w->codes[i] >> (k < 16 ? 0 : 4) & 15;
      dot += (double)(q - offset_of(c)) * (64 * x->high[g * GROUP + k] + x->low[g * GROUP + k]);
    }
    double s = c == Q4_K ? half(w->d[sup]) * w->sc[at] : half(w->d[at]), m = c == Q4_K ? half(w->m[sup]) * w->mn[at] : 0;
    y += s * x->d[g] * dot - m * x->sd[g];
    *size += fabs(s * x->d[g] * dot) + fabs(m * x->sd[g]);
  }
  return y;
}

typedef struct { Kernel *f; const Mat *w; const Act *x; float *y; int row0, row1, times; } Job;
static void *work(void *p) {
  Job *j = p;
  for (int i = 0; i < j->times; i++) j->f(j->w, j->x, j->y, j->row0, j->row1);
  return 0;
}
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
static double rate(Kernel *f, const Mat *w, const Act *x, float *y, int threads, int times) {
  double best = 1e9;
  for (int run = 0; run < 5; run++) {
    pthread_t id[2];
    Job j[2];
    double t = now();
    for (int i = 0; i < threads; i++) {
      j[i] = (Job){f, w, x, y, w->rows / threads * i, w->rows / threads * (i + 1), times};
      pthread_create(&id[i], 0, work, &j[i]);
    }
    for (int i = 0; i < threads; i++) pthread_join(id[i], 0);
    t = now() - t;
    if (run && t < best) best = t;
  }
  return w->bytes * (double)times / best / 1e9;
}

int main(int argc, char **argv) {
  int check_only = argc > 1 && !strcmp(argv[1], "--check");
  enum { COLS = 2048, ROWS = 320, BIG_MB = 512 };
  if (!check_only) puts("isa codec layout: GB/s in cache 1 thread, 2 threads; from memory 1 thread, 2 threads");
  for (int isa = 0; isa < ISAS; isa++)
    for (Codec c = Q4_0; c <= Q4_K; c++) {
      Mat small = make(c, ROWS, COLS), big = small;
      if (!check_only) big = make(c, (int)((size_t)BIG_MB * 1024 * 1024 / (small.bytes / ROWS)) / 32 * 32, COLS);
      Act x = act(c, COLS, signed_bytes(isa));
      float *y = memory((size_t)big.rows * 4);
      for (int layout = 0; layout < 2; layout++) {
        Kernel *f = kernels[isa][c][layout];
        f(&small, &x, y, 0, ROWS);
        for (int r = 0; r < ROWS; r++) {
          double size, e = expected(c, &small, &x, r, layout, &size);
          if (!(fabs(y[r] - e) <= 1e-5 * size)) {
            printf("%s %s layout %d row %d: %g, expected %g\n", isa_names[isa], codec_names[c], layout, r, y[r], e);
            return 1;
          }
        }
        if (check_only) continue;
        printf("%-6s %-5s %-11s", isa_names[isa], codec_names[c], layout ? "interleaved" : "planar");
        for (int threads = 1; threads <= 2; threads++) printf(" %6.1f", rate(f, &small, &x, y, threads, 2000));
        for (int threads = 1; threads <= 2; threads++) printf(" %6.1f", rate(f, &big, &x, y, threads, 1));
        puts("");
        fflush(stdout);
      }
    }
  if (check_only) puts("all results agree with sums in double precision");
}
