/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of a few rows with matrices of float32, int8 or int4, in vectors of LANES numbers: as many as a register holds, for
 * compilers keep longer ones in memory. */
#define ROWS 4 /* columns of y worked on together */
#define MOST_LANES 16 /* rows of a matrix are whole in vectors of any processor */
/* Rows of x worked on together, GROUP at most, with how many of these columns: the sums and what is multiplied stay in
 * registers, of which there are 32 or 16. */
#if defined(__AVX512F__)
#define LANES 16
#define GROUP 4
#define PANEL 64 /* rows of x worked on at once */
#elif defined(__AVX__)
#define LANES 8
#define GROUP 3
#define PANEL 66
#else
#define LANES 4
#define GROUP 3
#define PANEL 66
#endif
#define SLICE 512 /* columns of x worked on at once */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));

#define INLINE static inline __attribute__((always_inline))
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline vec load(const float *from) { return *(const vec *)from; }
#if defined(__AVX512F__)
static inline vec load8(const int8_t *from) {
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
#elif defined(__AVX2__)
static inline vec load8(const int8_t *from) {
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}
#else
static inline vec load8(const int8_t *from) {
  vec v;
  for (int i = 0; i < LANES; ++i) v[i] = from[i];
  return v;
}
#endif

/* GCC would load it again for each use. */
#if defined(__AVX__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v)
#endif

typedef float half __attribute__((vector_size(2 * LANES)));
typedef float quarter __attribute__((vector_size(16)));

static inline float sum(vec v) { /* in halves: one entry after the other takes as long as a product of 128 columns */
#if LANES > 4
  half a, b;
  memcpy(&a, &v, sizeof a);
  memcpy(&b, (const char *)&v + sizeof a, sizeof b);
  a += b;
#else
  const vec a = v;
#endif
#if LANES > 8
  quarter c, d;
  memcpy(&c, &a, sizeof c);
  memcpy(&d, (const char *)&a + sizeof c, sizeof d);
  c += d;
#else
  const quarter c = a;
#endif
  return (c[0] + c[2]) + (c[1] + c[3]);
}

/* Rows of w to ask for meanwhile, from `from` on: how many into the fastest cache; whether ROWS into the second. */
typedef struct {
  const char *from;
  int near, far;
} Ahead;

/* sums[i][r] += x[i, c] * w[r, c] for `slice` columns of M rows of x, side by side in LANES columns each, and ROWS of w. */
#define STEP(LOAD, M, C)                                                                                               \
  {                                                                                                                    \
    vec in[M];                                                                                                         \
    for (int i = 0; i < M; ++i) {                                                                                      \
      in[i] = load(x + (C) * M + i * LANES);                                                                           \
      IN_REGISTER(in[i]);                                                                                              \
    }                                                                                                                  \
    for (int r = 0; r < ROWS; ++r) {                                                                                   \
      vec wr = LOAD(w + r * k + (C));                                                                                  \
      IN_REGISTER(wr);                                                                                                 \
      for (int i = 0; i < M; ++i) acc[i][r] += in[i] * wr;                                                             \
    }                                                                                                                  \
  }
#define BLOCK(NAME, TYPE, LOAD, M)                                                                                     \
  static void NAME##_##M(const float *x, const TYPE *w, vec (*sums)[ROWS], int64_t k, int64_t slice,                   \
                         Ahead ahead) {                                                                                \
    vec acc[M][ROWS];                                                                                                  \
    memcpy(acc, sums, sizeof acc);                                                                                     \
    const int64_t in_line = LINE / sizeof(TYPE), whole = slice / in_line * in_line;                                    \
    for (int64_t c = 0; c < whole; c += in_line) {                                                                     \
      const TYPE *from = (const TYPE *)ahead.from + c;                                                                 \
      for (int r = 0; r < ROWS; ++r)                                                                                   \
        if (r < ahead.near) __builtin_prefetch(from + r * k);                                                          \
      for (int r = 0; ahead.far && r < ROWS; ++r) __builtin_prefetch(from + r * k, 0, 2);                              \
      _Pragma("GCC unroll 4") for (int part = 0; part < LINE / (int)sizeof(TYPE); part += LANES)                       \
        STEP(LOAD, M, c + part)                                                                                        \
    }                                                                                                                  \
    for (int64_t c = whole; c < slice; c += LANES) STEP(LOAD, M, c)                                                    \
    memcpy(sums, acc, sizeof acc);                                                                                     \
  }
typedef struct {
  const float *x;
  const void *w;
  const float *scale, *bias;
  float *y;
  int64_t m, k, n;
  const uint8_t *zero; /* of int4: zero points of groups of so many columns */
  int64_t group;
} Product;

/* What rows i .. of m ask for: each its share of `next`, the slice of w that is worked on then, so that memory is never idle
 * and what comes is used before it is pushed out. Rows of int8 are done before it comes, and 9 to 16 of x fill the fastest
 * cache: there the last ones ask for the rows after w and, of floats, those before them for what is behind that. A single row
 * of x reads floats as the processor predicts. Measured. */
static inline Ahead to_ask(int64_t i, int64_t m, const char *w, const char *next, int64_t row, int is_float) {
  const int64_t blocks = (m + GROUP - 1) / GROUP, first = i / GROUP * ROWS / blocks, last = (i / GROUP + 1) * ROWS / blocks;
  if (is_float && m == 1) return (Ahead){w, 0, 0};
  if (is_float && (blocks <= 2 || blocks > 4)) return (Ahead){next + first * row, last - first, 0};
  if (i + GROUP >= m) return (Ahead){w + ROWS * row, ROWS, 0};
  return (Ahead){w + 2 * ROWS * row, 0, is_float};
}

/* y[i, j] = sum over c of x[i, c] * w[j, c] (* scale[j]) (+ bias[j]). K: a multiple of LANES, N of ROWS. Columns are worked
 * through in slices, so that those of x stay in the fastest cache from one row of w to the next. */
#define PRODUCT(NAME, TYPE, LOAD)                                                                                      \
  BLOCK(NAME, TYPE, LOAD, 1)                                                                                           \
  BLOCK(NAME, TYPE, LOAD, 2)                                                                                           \
  BLOCK(NAME, TYPE, LOAD, 3)                                                                                           \
  BLOCK(NAME, TYPE, LOAD, 4)                                                                                           \
  /* the same for so many rows, GROUP at most */                                                                       \
  static inline void NAME##_rows(int64_t rows, const float *x, const TYPE *w, vec (*sums)[ROWS], int64_t k,            \
                                 int64_t slice, Ahead ahead) {                                                         \
    switch (least(rows, GROUP)) {                                                                                      \
      case 1: NAME##_1(x, w, sums, k, slice, ahead); break;                                                            \
      case 2: NAME##_2(x, w, sums, k, slice, ahead); break;                                                            \
      case 3: NAME##_3(x, w, sums, k, slice, ahead); break;                                                            \
      default: NAME##_4(x, w, sums, k, slice, ahead);                                                                  \
    }                                                                                                                  \
  }                                                                                                                    \
  /* columns ROWS * from to ROWS * to of y */                                                                          \
  static void NAME##_columns(const void *with, int64_t from, int64_t to) {                                             \
    const Product p = *(const Product *)with;                                                                          \
    const int64_t k = p.k, n = p.n, most = p.m > GROUP ? SLICE : k, row = k * sizeof(TYPE);                            \
    vec sums[PANEL][ROWS];                                                                                             \
    for (int64_t j = ROWS * from; j < ROWS * to; j += ROWS) {                                                          \
      memset(sums, 0, p.m * sizeof *sums);                                                                             \
      for (int64_t c = 0; c < k; c += most) {                                                                          \
        const TYPE *w = (const TYPE *)p.w + j * k + c;                                                                 \
        const int64_t slice = k - c < most ? k - c : most;                                                             \
        const void *next = c + slice < k ? w + slice : (const TYPE *)p.w + (j + ROWS) * k;                             \
        const float *x = p.x + c * p.m;                                                                                \
        for (int64_t i = 0; i < p.m; i += GROUP, x += GROUP * slice) {                                                 \
          const Ahead ahead = to_ask(i, p.m, (const void *)w, next, row, sizeof(TYPE) == sizeof(float));               \
          NAME##_rows(p.m - i, x, w, sums + i, k, slice, ahead);                                                       \
        }                                                                                                              \
      }                                                                                                                \
      for (int64_t i = 0; i < p.m; ++i)                                                                                \
        for (int r = 0; r < ROWS; ++r)                                                                                 \
          p.y[i * n + j + r] = sum(sums[i][r]) * (p.scale ? p.scale[j + r] : 1.0f) + (p.bias ? p.bias[j + r] : 0.0f);  \
    }                                                                                                                  \
  }                                                                                                                    \
  /* Not 0: there is no memory. */                                                                                     \
  static int NAME(const float *x, const TYPE *w, const float *scale, const float *bias, float *y, int64_t m,           \
                  int64_t k, int64_t n) {                                                                              \
    return in_panels(NAME##_columns, (Product){x, w, scale, bias, y, m, k, n, NULL, 0});                               \
  }

/* Rows of x (M, K) in slices of columns, a slice in groups of GROUP, of which LANES columns each lie together: rows at a
 * distance of a power of 2 would push each other out of the cache. */
static void side_by_side(float *packed, const float *x, int64_t m, int64_t k) {
  const int64_t most = m > GROUP ? SLICE : k;
  for (int64_t from = 0; from < k; from += most) {
    const int64_t to = k - from < most ? k : from + most;
    for (int64_t i = 0; i < m; i += GROUP)
      for (int64_t c = from; c < to; c += LANES)
        for (int64_t r = i; r < m && r < i + GROUP; ++r, packed += LANES)
          memcpy(packed, x + r * k + c, LANES * sizeof(float));
  }
}

/* A product by `columns`, PANEL rows of x at once. Not 0: there is no memory. */
static int in_panels(Work columns, Product p) {
  const float *x = p.x;
  const int64_t m = p.m, most = m < PANEL ? m : PANEL;
  float *packed = m > 1 ? aligned_alloc(LINE, most * p.k * sizeof(float)) : NULL;
  if (m > 1 && !packed) return 1;
  for (int64_t i = 0; i < m; i += p.m, p.y += p.m * p.n) {
    p.m = m - i < most ? m - i : most;
    if (packed) side_by_side(packed, x + i * p.k, p.m, p.k);
    p.x = packed ? packed : x;
    in_parallel(columns, &p, p.n / ROWS, p.m * p.n * p.k);
  }
  free(packed);
  return 0;
}

PRODUCT(product, float, load)
PRODUCT(product8, int8_t, load8)

/* int4: 2 * MOST_LANES columns of a row in MOST_LANES bytes, the first half of them in the low bits. An entry is (q - zero) *
 * scale of its group, rounded once, as the operators have it: where the processor can choose from 16 floats, a group's are computed once. */
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

/* sums[i][r] as above, for `slice` columns from `from` on and the rows of w from j on */
#define BLOCK4(M)                                                                                                      \
  static void product4_##M(const float *x, const Product *p, int64_t j, int64_t from, int64_t slice,                   \
                           vec (*sums)[ROWS]) {                                                                        \
    vec acc[M][ROWS];                                                                                                  \
    memcpy(acc, sums, sizeof acc);                                                                                     \
    const int64_t row = p->k / 2, groups = p->k / p->group;                                                            \
    const uint8_t *w = (const uint8_t *)p->w + j * row + from / 2;                                                     \
    for (int64_t c = 0; c < slice;) {                                                                                  \
      const int64_t g = (from + c) / p->group, next = (g + 1) * p->group - from, end = next < slice ? next : slice;    \
      Levels of[ROWS];                                                                                                 \
      for (int r = 0; r < ROWS; ++r) {                                                                                 \
        const int64_t at = (j + r) * groups + g;                                                                       \
        of[r] = levels(p->scale[at], p->zero ? p->zero[at] : ZERO);                                                    \
        __builtin_prefetch(w + (ROWS + r) * row + c / 2);                                                              \
      }                                                                                                                \
      for (; c < end; c += 2 * MOST_LANES)                                                                             \
        for (int part = 0; part < 2 * MOST_LANES; part += LANES) {                                                     \
          vec in[M];                                                                                                   \
          for (int i = 0; i < M; ++i) {                                                                                \
            in[i] = load(x + (c + part) * M + i * LANES);                                                              \
            IN_REGISTER(in[i]);                                                                                        \
          }                                                                                                            \
          for (int r = 0; r < ROWS; ++r) {                                                                             \
            vec wr = load4(w + r * row + c / 2 + part % MOST_LANES, of[r], part / MOST_LANES);                         \
            IN_REGISTER(wr);                                                                                           \
            for (int i = 0; i < M; ++i) acc[i][r] += in[i] * wr;                                                       \
          }                                                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    memcpy(sums, acc, sizeof acc);                                                                                     \
  }
BLOCK4(1)
BLOCK4(2)
BLOCK4(3)
#if GROUP == 4
BLOCK4(4)
#endif

/* `slice` columns from `from` on of rows j .. of w as floats, SLICE from each other */
static void widen4(float *wide, const Product *p, int64_t j, int64_t from, int64_t slice) {
  for (int64_t r = j; r < j + ROWS; ++r, wide += SLICE)
    for (int64_t c = from; c < from + slice; c += 2 * MOST_LANES) {
      const int64_t at = (r * p->k + c) / p->group;
      const uint8_t *w = (const uint8_t *)p->w + (r * p->k + c) / 2;
      const Levels of = levels(p->scale[at], p->zero ? p->zero[at] : ZERO);
      for (int part = 0; part < 2 * MOST_LANES; part += LANES)
        *(vec *)(wide + c - from + part) = load4(w + part % MOST_LANES, of, part / MOST_LANES);
    }
}

/* For few rows of x numbers are widened where they are used, for more of them before. */
static void product4_columns(const void *with, int64_t from, int64_t to) {
  const Product p = *(const Product *)with;
  const int64_t k = p.k, most = p.m > GROUP ? SLICE : k;
  vec sums[PANEL][ROWS];
  float wide[ROWS * SLICE];
  for (int64_t j = ROWS * from; j < ROWS * to; j += ROWS) {
    memset(sums, 0, p.m * sizeof *sums);
    for (int64_t c = 0; c < k; c += most) {
      const int64_t slice = least(k - c, most);
      const float *x = p.x + c * p.m;
      if (p.m > GROUP) widen4(wide, &p, j, c, slice);
      for (int64_t i = 0; p.m > GROUP && i < p.m; i += GROUP, x += GROUP * slice)
        product_rows(p.m - i, x, wide, sums + i, SLICE, slice, (Ahead){NULL, 0, 0});
      switch (p.m) {
        case 1: product4_1(x, &p, j, c, slice, sums); break;
        case 2: product4_2(x, &p, j, c, slice, sums); break;
        case 3: product4_3(x, &p, j, c, slice, sums); break;
#if GROUP == 4
        case 4: product4_4(x, &p, j, c, slice, sums);
#endif
      }
    }
    for (int64_t i = 0; i < p.m; ++i)
      for (int r = 0; r < ROWS; ++r) p.y[i * p.n + j + r] = sum(sums[i][r]) + (p.bias ? p.bias[j + r] : 0.0f);
  }
}

/* x (M, K), w (N, K/32, 16), scale and zero (N, groups), zero or bias (N,) or none -> y (M, N). Not 0: there is no memory. */
static int product4(const float *x, const void *w, const float *scale, const uint8_t *zero, const float *bias, float *y,
                    int64_t m, int64_t k, int64_t n, int64_t groups) {
  return in_panels(product4_columns, (Product){x, w, scale, bias, y, m, k, n, zero, k / groups});
}

/* x (M, K), w (N, K), bias (N,) or none, float32 -> (M, N); K a multiple of LANES, N of ROWS */
int linear(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product(p[0], p[1], NULL, count > 3 ? p[2] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0]);
}

/* the same with w int8 and its scale, (N,), (N, 1) or (1, N), before the bias */
int linear_int8(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product8(p[0], p[1], p[2], count > 4 ? p[3] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0]);
}

/* the same with w int4 (N, K/32, 16) and its scales (N, groups) */
int linear_int4(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product4(p[0], p[1], p[2], NULL, count > 4 ? p[3] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0],
                  shapes[2][1]);
}

/* and with zero points (N, groups) behind the scales */
int linear_int4_zeros(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product4(p[0], p[1], p[2], p[3], count > 5 ? p[4] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0],
                  shapes[2][1]);
}
