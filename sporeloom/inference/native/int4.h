/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of a few rows with matrices of int4. */
/* int4: 2 * MOST_LANES columns of a row in MOST_LANES bytes, the first half of them in the low bits. An entry is (q - zero) *
 * scale of its group, rounded once, as the operators have it: where the processor can choose from 16 floats, a group's are
 * computed once. */
#define ZERO 8 /* where groups have no zero point of their own */
#define VECS (2 * MOST_LANES / LANES) /* of the columns in MOST_LANES bytes */
#if defined(__AVX512F__)
typedef vec Levels;
static inline Levels levels(float scale, float zero) {
  return ((vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - zero) * scale;
}
INLINE void load4(const uint8_t *from, Levels of, int has_zeros, vec *w) {
  const __m512i q = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)); /* the choice is by the 4 lowest bits */
  w[0] = (vec)_mm512_permutexvar_ps(q, (__m512)of);
  w[1] = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), (__m512)of);
}
#elif defined(__AVX2__) && defined(__FMA__)
typedef struct {
  __m256 scale, zero, offset; /* -ZERO * scale, exactly: q * scale + offset is then rounded once, too */
} Levels;
static inline Levels levels(float scale, float zero) {
  return (Levels){_mm256_set1_ps(scale), _mm256_set1_ps(zero), _mm256_set1_ps(-ZERO * scale)};
}
INLINE vec entries(__m256i q, Levels of, int has_zeros) {
  const __m256 v = _mm256_cvtepi32_ps(q);
  return (vec)(has_zeros ? _mm256_mul_ps(_mm256_sub_ps(v, of.zero), of.scale) : _mm256_fmadd_ps(v, of.scale, of.offset));
}
INLINE void load4(const uint8_t *from, Levels of, int has_zeros, vec *w) {
  const __m256i low_bits = _mm256_set1_epi32(15);
  for (int half = 0; half < 2; ++half) {
    const __m256i q = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + half * LANES)));
    w[half] = entries(_mm256_and_si256(q, low_bits), of, has_zeros);
    w[half + 2] = entries(_mm256_srli_epi32(q, 4), of, has_zeros);
  }
}
#else
typedef struct {
  float scale, zero;
} Levels;
static inline Levels levels(float scale, float zero) { return (Levels){scale, zero}; }
INLINE void load4(const uint8_t *from, Levels of, int has_zeros, vec *w) {
  for (int part = 0; part < VECS; ++part) {
    const uint8_t *bytes = from + part * LANES % MOST_LANES;
    for (int i = 0; i < LANES; ++i) w[part][i] = part < VECS / 2 ? bytes[i] & 15 : bytes[i] >> 4;
    w[part] = (w[part] - of.zero) * of.scale;
  }
}
#endif

/* sums[i][r] = sum over c of x[i, c] * w[r, c] for m rows of x and those of w from j on; m and has_zeros are constants of the
 * caller. */
INLINE void few_rows4(int m, int has_zeros, const float *x, const Product *p, int64_t j, vec (*sums)[ROWS]) {
  vec acc[GROUP][ROWS] = {{{0}}};
  const int64_t row = p->k / 2, groups = p->k / p->group;
  const uint8_t *w = (const uint8_t *)p->w + j * row, *end = w + row, *ahead = w + ROWS * row;
  const uint8_t *zero = has_zeros ? p->zero + j * groups : NULL;
  const float *scale = p->scale + j * groups;
  while (w < end) {
    for (const uint8_t *of_group = w + p->group / 2; w < of_group; w += MOST_LANES, x += 2 * MOST_LANES * m) {
      __builtin_prefetch(ahead);
      ahead += ROWS * MOST_LANES;
      UNROLLED for (int r = 0; r < ROWS; ++r) {
        vec in[VECS];
        load4(w + r * row, levels(scale[r * groups], has_zeros ? zero[r * groups] : ZERO), has_zeros, in);
        for (int part = 0; part < VECS; ++part)
          UNROLLED for (int i = 0; i < m; ++i) acc[i][r] += load(x + part * LANES * m + i * LANES) * in[part];
      }
    }
    ++scale;
    zero += has_zeros;
  }
  for (int i = 0; i < m; ++i)
    for (int r = 0; r < ROWS; ++r) sums[i][r] = acc[i][r];
}
#define BLOCK4(M)                                                                                                      \
  static __attribute__((noinline)) void product4_##M(const float *x, const Product *p, int64_t j, vec (*sums)[ROWS]) { \
    if (p->zero)                                                                                                       \
      few_rows4(M, 1, x, p, j, sums);                                                                                  \
    else                                                                                                               \
      few_rows4(M, 0, x, p, j, sums);                                                                                  \
  }
BLOCK4(1)
BLOCK4(2)
BLOCK4(3)
IF_FOUR(BLOCK4(4))

static inline void product4_widen(float *tile, const Product *p, int64_t j, int64_t from, int64_t slice) {
  for (int64_t r = j; r < j + ROWS; ++r, tile += LANES)
    for (int64_t c = from; c < from + slice; c += 2 * MOST_LANES) {
      const int64_t at = (r * p->k + c) / p->group;
      vec w[VECS];
      const Levels of = levels(p->scale[at], p->zero ? p->zero[at] : ZERO);
      load4((const uint8_t *)p->w + (r * p->k + c) / 2, of, p->zero != NULL, w);
      for (int part = 0; part < VECS; ++part) *(vec *)(tile + (c - from + part * LANES) * ROWS) = w[part];
    }
}

/* For few rows of x numbers are widened where they are used, for more of them before. */
static void product4_columns(const void *with, int64_t from, int64_t to) {
  const Product *p = with;
  if (p->m > GROUP) {
    in_tiles(p, from, to, product4_widen, 4);
    return;
  }
  vec sums[GROUP][ROWS];
  for (int64_t j = ROWS * from; j < ROWS * to; j += ROWS) {
    switch (p->m) {
      case 1: product4_1(p->x, p, j, sums); break;
      case 2: product4_2(p->x, p, j, sums); break;
      case 3: product4_3(p->x, p, j, sums); break;
      IF_FOUR(default: product4_4(p->x, p, j, sums);)
    }
    finish(p, NULL, j, sums);
  }
}

/* x (M, K), w (N, K/32, 16), scale and zero (N, groups), zero or bias (N,) or none -> y (M, N). Not 0: there is no memory. */
static int product4(const float *x, const void *w, const float *scale, const uint8_t *zero, const float *bias, float *y,
                    int64_t m, int64_t k, int64_t n, int64_t groups) {
  return in_panels(product4_columns, GROUP, (Product){x, w, scale, bias, y, m, k, n, zero, k / groups, 0});
}

/* `linear` with w int4 (N, K/32, 16) and its scales (N, groups) */
int linear_int4(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product4(p[0], p[1], p[2], NULL, count > 4 ? p[3] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0],
                  shapes[2][1]);
}

/* and with zero points (N, groups) behind the scales */
int linear_int4_zeros(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product4(p[0], p[1], p[2], p[3], count > 5 ? p[4] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0],
                  shapes[2][1]);
}
