/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of int8 rows, each with its scale, with matrices of int8 (W8A8), summed up in int32: exactly, in whatever order. */
/* x (D) as int8 -> y; returns its scale, NaN where an entry is not finite. As sporeloom/nn/vector_quantizer.py. */
static float quantize(const float *x, int8_t *y, int64_t d) {
  float top = 1e-30f;
  int is_finite = 1;
  for (int64_t c = 0; c < d; ++c) {
    is_finite &= fabsf(x[c]) <= FLT_MAX;
    top = fabsf(x[c]) > top ? fabsf(x[c]) : top;
  }
  if (!is_finite) {
    memset(y, 0, d);
    return NAN;
  }
  const float scale = top / 127.0f;
  for (int64_t c = 0; c < d; ++c) y[c] = (int8_t)rintf(x[c] / scale);
  return scale;
}

#if defined(__AVX2__) && !(defined(__AVX512VNNI__) && defined(__AVX512BW__))
typedef int16_t Quantized; /* widened once, not for each row of w */
#define ROWS_OF_X 3 /* worked on together: their sums stay in registers */
#else
typedef int8_t Quantized;
#define ROWS_OF_X 4
#endif

typedef struct {
  const Quantized *x; /* rows, `stride` numbers from each other; with VNNI they are larger by 128, and unsigned */
  const float *of_x;
  const int8_t *w;
  const float *scale, *bias;
  float *y;
  int64_t m, k, n, stride;
} IntProduct;

/* sums[i][r] = sum over c of x[i, c] * w[r, c], for M rows of x and ROWS of w. M is a constant of the caller. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define OFFSET 128
INLINE void int_sums(const int8_t *x, int64_t stride, const int8_t *w, int64_t k, int m, int32_t (*sums)[ROWS]) {
  __m512i acc[ROWS][ROWS], too_much[ROWS]; /* too_much: OFFSET * w */
  for (int r = 0; r < ROWS; ++r) {
    too_much[r] = _mm512_setzero_si512();
    for (int i = 0; i < m; ++i) acc[i][r] = _mm512_setzero_si512();
  }
  const __m512i offset = _mm512_set1_epi8((char)OFFSET);
  for (int64_t c = 0; c < k; c += LINE) {
    const __mmask64 there = k - c < LINE ? ((__mmask64)1 << (k - c)) - 1 : ~(__mmask64)0;
    __m512i in[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      in[r] = _mm512_maskz_loadu_epi8(there, w + r * k + c);
      too_much[r] = _mm512_dpbusd_epi32(too_much[r], offset, in[r]);
      __builtin_prefetch(w + (ROWS + r) * k + c);
    }
    for (int i = 0; i < m; ++i) {
      const __m512i xi = _mm512_load_si512(x + i * stride + c);
      for (int r = 0; r < ROWS; ++r) acc[i][r] = _mm512_dpbusd_epi32(acc[i][r], xi, in[r]);
    }
  }
  for (int i = 0; i < m; ++i)
    for (int r = 0; r < ROWS; ++r) sums[i][r] = _mm512_reduce_add_epi32(_mm512_sub_epi32(acc[i][r], too_much[r]));
}
#elif defined(__AVX2__)
#define OFFSET 0
INLINE void int_sums(const int16_t *x, int64_t stride, const int8_t *w, int64_t k, int m, int32_t (*sums)[ROWS]) {
  __m256i acc[ROWS_OF_X][ROWS];
  for (int i = 0; i < m; ++i)
    for (int r = 0; r < ROWS; ++r) acc[i][r] = _mm256_setzero_si256();
  for (int64_t c = 0; c < k; c += MOST_LANES) {
    for (int r = 0; r < ROWS && c % LINE == 0; ++r) __builtin_prefetch(w + ROWS * (k + c) + r * LINE);
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      const __m256i in = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + r * k + c)));
      UNROLLED for (int i = 0; i < m; ++i) {
        const __m256i xi = _mm256_loadu_si256((const __m256i *)(x + i * stride + c));
        acc[i][r] = _mm256_add_epi32(acc[i][r], _mm256_madd_epi16(xi, in));
      }
    }
  }
  for (int i = 0; i < m; ++i) {
    const __m256i halves = _mm256_hadd_epi32(_mm256_hadd_epi32(acc[i][0], acc[i][1]), _mm256_hadd_epi32(acc[i][2], acc[i][3]));
    const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128((__m128i *)sums[i], all);
  }
}
#else
#define OFFSET 0
INLINE void int_sums(const int8_t *x, int64_t stride, const int8_t *w, int64_t k, int m, int32_t (*sums)[ROWS]) {
  for (int i = 0; i < m; ++i)
    for (int r = 0; r < ROWS; ++r) {
      int32_t all = 0;
      for (int64_t c = 0; c < k; ++c) all += (int16_t)x[i * stride + c] * (int16_t)w[r * k + c];
      sums[i][r] = all;
    }
}
#endif

/* a * b + c, rounded in one way: compilers round some of a loop's once, and others twice. */
static inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

/* columns ROWS * from to ROWS * to of y */
static void product_w8a8_columns(const void *with, int64_t from, int64_t to) {
  const IntProduct p = *(const IntProduct *)with;
  for (int64_t j = ROWS * from; j < ROWS * to; j += ROWS) {
    const int8_t *w = p.w + j * p.k;
    for (int64_t i = 0; i < p.m; i += ROWS_OF_X) {
      const int64_t rows = least(p.m - i, ROWS_OF_X);
      const Quantized *x = p.x + i * p.stride;
      int32_t sums[ROWS_OF_X][ROWS];
      switch (rows) {
        case 1: int_sums(x, p.stride, w, p.k, 1, sums); break;
        case 2: int_sums(x, p.stride, w, p.k, 2, sums); break;
#if ROWS_OF_X > 3
        case 3: int_sums(x, p.stride, w, p.k, 3, sums); break;
#endif
        default: int_sums(x, p.stride, w, p.k, ROWS_OF_X, sums);
      }
      for (int64_t a = 0; a < rows; ++a)
        for (int r = 0; r < ROWS; ++r) {
          const float y = (float)sums[a][r] * p.of_x[i + a], scale = p.scale[j + r];
          p.y[(i + a) * p.n + j + r] = p.bias ? multiply_add(y, scale, p.bias[j + r]) : y * scale;
        }
    }
  }
}

/* x (M, K), w (N, K) with scale (N,), bias (N,) or none -> y (M, N). Not 0: there is no memory. */
static int product_w8a8(const float *x, const int8_t *w, const float *scale, const float *bias, float *y, int64_t m, int64_t k,
                        int64_t n) {
  const int64_t most = least(m, PANEL), stride = (k + LINE - 1) / LINE * LINE;
  Quantized *q = aligned_alloc(LINE, (most + 1) * stride * sizeof *q);
  if (!q) return 1;
  memset(q, 0, most * stride * sizeof *q);
  int8_t *bytes = (int8_t *)(q + most * stride);
  float of_x[PANEL];
  for (int64_t from = 0; from < m; from += most) {
    const int64_t rows = least(m - from, most);
    for (int64_t i = 0; i < rows; ++i) {
      of_x[i] = quantize(x + (from + i) * k, bytes, k);
      for (int64_t c = 0; c < k; ++c) q[i * stride + c] = (Quantized)(bytes[c] ^ OFFSET);
    }
    const IntProduct p = {q, of_x, w, scale, bias, y + from * n, rows, k, n, stride};
    in_parallel(product_w8a8_columns, &p, n / ROWS, rows * n * k);
  }
  free(q);
  return 0;
}

/* like linear_int8, with x rounded to int8 */
int linear_w8a8(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product_w8a8(p[0], p[1], p[2], count > 4 ? p[3] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0]);
}
