/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of a few rows with matrices of int4. */
/* int4: 2 * MOST_LANES columns of a row in MOST_LANES bytes, the first half of them in the low bits. An entry is (q - zero) *
 * scale of its group, rounded once, as the operators have it: where the processor can choose from 16 floats, a group's are
 * computed once. */
#define ZERO 8 /* where groups have no zero point of their own */
#if defined(__AVX512F__)
typedef vec Levels;
static inline Levels levels(float scale, float zero) {
  return ((vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - zero) * scale;
}
static inline vec load4(const uint8_t *from, Levels of, int half) {
  const __m512i q = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)); /* the choice is by the 4 lowest bits */
  return (vec)_mm512_permutexvar_ps(half ? _mm512_srli_epi32(q, 4) : q, (__m512)of);
}
#else
typedef struct {
  float scale, zero;
} Levels;
static inline Levels levels(float scale, float zero) { return (Levels){scale, zero}; }
static inline vec load4(const uint8_t *from, Levels of, int half) {
#if defined(__AVX2__)
  const __m128i both = _mm_loadl_epi64((const __m128i *)from), q = half ? _mm_srli_epi16(both, 4) : both;
  const vec v = (vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(q, _mm_set1_epi8(15))));
#else
  vec v;
  for (int i = 0; i < LANES; ++i) v[i] = half ? from[i] >> 4 : from[i] & 15;
#endif
  return (v - of.zero) * of.scale;
}
#endif

/* sums[i][r] as above, with the rows of w from j on */
#define BLOCK4(M)                                                                                                      \
  static void product4_##M(const float *x, const Product *p, int64_t j, vec (*sums)[ROWS]) {                           \
    vec acc[M][ROWS] = {{{0}}};                                                                                        \
    const int64_t row = p->k / 2, groups = p->k / p->group;                                                            \
    const uint8_t *w = (const uint8_t *)p->w + j * row;                                                                \
    for (int64_t g = 0; g < groups; ++g) {                                                                             \
      const int64_t from = g * p->group, to = from + p->group;                                                         \
      Levels of[ROWS];                                                                                                 \
      for (int r = 0; r < ROWS; ++r) {                                                                                 \
        const int64_t at = (j + r) * groups + g;                                                                       \
        of[r] = levels(p->scale[at], p->zero ? p->zero[at] : ZERO);                                                    \
        __builtin_prefetch(w + (ROWS + r) * row + from / 2);                                                           \
      }                                                                                                                \
      for (int64_t c = from; c < to; c += 2 * MOST_LANES)                                                              \
        for (int part = 0; part < 2 * MOST_LANES; part += LANES)                                                       \
          STEP(M, x + (c + part) * M, load4(w + r * row + c / 2 + part % MOST_LANES, of[r], part / MOST_LANES), 0)     \
    }                                                                                                                  \
    memcpy(sums, acc, sizeof acc);                                                                                     \
  }
BLOCK4(1)
BLOCK4(2)
BLOCK4(3)
IF_FOUR(BLOCK4(4))

static inline void product4_widen(float *tile, const Product *p, int64_t j, int64_t from, int64_t slice) {
  for (int64_t r = j; r < j + ROWS; ++r, tile += LANES)
    for (int64_t c = from; c < from + slice; c += 2 * MOST_LANES) {
      const int64_t at = (r * p->k + c) / p->group;
      const uint8_t *w = (const uint8_t *)p->w + (r * p->k + c) / 2;
      const Levels of = levels(p->scale[at], p->zero ? p->zero[at] : ZERO);
      for (int part = 0; part < 2 * MOST_LANES; part += LANES)
        *(vec *)(tile + (c - from + part) * ROWS) = load4(w + part % MOST_LANES, of, part / MOST_LANES);
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
