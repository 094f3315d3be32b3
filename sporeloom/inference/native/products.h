/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of a few rows with matrices of float32 or int8, in vectors of LANES numbers: as many as a register holds, for
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
#if GROUP == 4
#define IF_FOUR(...) __VA_ARGS__
#else
#define IF_FOUR(...)
#endif
#define IN_PLACE 24 /* rows of x, at most, for which rows of a matrix of floats are read as they lie */
#define SLICE 256 /* columns of those worked on at once: they and the next ones, on their way, fit into the fastest cache */
#define TILE 512 /* columns of w that are copied for more rows, or widened */
#define MOST_GROUPS (PANEL / GROUP)
#define SOON 512 /* bytes between what a single row is multiplied with and what is asked for meanwhile */

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
#define STILL_USED(v) __asm__("" : : "v"(v)) /* else GCC puts a sum in its place, and spills */
#else
#define IN_REGISTER(v)
#define STILL_USED(v)
#endif

typedef float half __attribute__((vector_size(2 * LANES)));
typedef float quarter __attribute__((vector_size(16)));
typedef int32_t four __attribute__((vector_size(16)));
static inline quarter load_quarter(const float *from) {
  quarter v;
  memcpy(&v, from, sizeof v);
  return v;
}

static inline quarter quarters(vec v) {
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
  return c;
}

static inline float sum(vec v) { /* in halves: one entry after the other takes as long as a product of 128 columns */
  const quarter c = quarters(v);
  return (c[0] + c[2]) + (c[1] + c[3]);
}

/* `sum` of each of ROWS vectors, in the same order */
static inline quarter sums_of_rows(const vec *of) {
  const quarter a = quarters(of[0]), b = quarters(of[1]), c = quarters(of[2]), d = quarters(of[3]);
  const quarter ab = __builtin_shuffle(a, b, (four){0, 4, 1, 5}) + __builtin_shuffle(a, b, (four){2, 6, 3, 7});
  const quarter cd = __builtin_shuffle(c, d, (four){0, 4, 1, 5}) + __builtin_shuffle(c, d, (four){2, 6, 3, 7});
  return __builtin_shuffle(ab, cd, (four){0, 1, 4, 5}) + __builtin_shuffle(ab, cd, (four){2, 3, 6, 7});
}

typedef struct {
  const float *x;
  const void *w;
  const float *scale, *bias;
  float *y;
  int64_t m, k, n;
  const uint8_t *zero; /* of int4: zero points of groups of so many columns */
  int64_t group;
  int64_t slice; /* columns of x worked on at once, for few rows of it; no more than GROUP are in one piece */
} Product;

#define UNROLLED _Pragma("GCC unroll 4")
/* acc[i][r] += x[i, c] * w[r, c] for LANES columns of M rows of x and ROWS of w, given as what is loaded. KEEPS: all of it
 * stays in registers, where what is loaded needs none itself. */
#define STEP(M, X, W, KEEPS)                                                                                           \
  {                                                                                                                    \
    vec in[M];                                                                                                         \
    UNROLLED for (int i = 0; i < M; ++i) {                                                                             \
      in[i] = load(X + i * LANES);                                                                                     \
      IN_REGISTER(in[i]);                                                                                              \
    }                                                                                                                  \
    UNROLLED for (int r = 0; r < ROWS; ++r) {                                                                          \
      vec wr = W;                                                                                                      \
      IN_REGISTER(wr);                                                                                                 \
      UNROLLED for (int i = 0; i < M; ++i) acc[i][r] += in[i] * wr;                                                    \
      if (KEEPS) STILL_USED(wr);                                                                                       \
    }                                                                                                                  \
    UNROLLED for (int i = 0; KEEPS && i < M; ++i) STILL_USED(in[i]);                                                   \
  }

/* y[i, j + r] = the sum of sums[i][r] (* scale[j + r]) (+ bias[j + r]) */
static inline void finish(const Product *p, const float *scale, int64_t j, vec (*sums)[ROWS]) {
  for (int64_t i = 0; i < p->m; ++i) {
    const quarter factor = scale ? load_quarter(scale + j) : (quarter){1.0f, 1.0f, 1.0f, 1.0f};
    const quarter bias = p->bias ? load_quarter(p->bias + j) : (quarter){0};
    quarter y = sums_of_rows(sums[i]) * factor;
    IN_REGISTER(y); /* rounded before the bias is added, as the operators have it */
    y += bias;
    memcpy(p->y + i * p->n + j, &y, sizeof y);
  }
}

/* Rows of x that are worked on together, `rows` from `begin` on, and rows of w that are asked for meanwhile, `count` of ROWS from
 * `first` on: between them the groups ask for all. */
typedef struct {
  int64_t begin, rows, first;
  int count;
} Group;

/* Groups of about as many rows, GROUP at most: the sums of one row do not fill the processor. Returns their number. */
static int64_t find_groups(Group *groups, int64_t m) {
  const int64_t all = (m + GROUP - 1) / GROUP;
  for (int64_t g = 0; g < all; ++g) {
    const int64_t begin = g * m / all, first = g * ROWS / all;
    groups[g] = (Group){begin, (g + 1) * m / all - begin, first, (g + 1) * ROWS / all - first};
  }
  return all;
}

/* Rows of w to ask for meanwhile: `count` rows from `from` on, `row` bytes from each other, and of each `step` bytes at a
 * time. */
typedef struct {
  const char *from;
  int64_t row, step;
  int count;
} Ahead;

/* What a group asks for: its share of the slice of w that is worked on next, behind `slice` columns from c on of rows j .., so
 * that memory is never idle and what comes is used before it is pushed out. bits: of a number of w; columns: for which it asks
 * at a time. */
static inline Ahead share_of_next(const Product *p, Group of, int64_t j, int64_t c, int64_t slice, int64_t bits,
                                  int64_t columns) {
  const int64_t row = p->k * bits / 8;
  if (p->m <= GROUP && bits == 8) /* whole rows in one stream: those of bytes are short */
    return (Ahead){(const char *)p->w + (j + ROWS) * row + of.first * LINE, LINE, ROWS * LINE, of.count};
  int64_t next = c + slice < p->k ? j * row + (c + slice) * bits / 8 : (j + ROWS) * row;
  if (p->m == 1 && bits == 32) next = j * row + SOON; /* nothing but memory takes time */
  return (Ahead){(const char *)p->w + next + of.first * row, row, columns * bits / 8, of.count};
}

/* sums[i][r] = or, unless these columns are the first ones, += x[i, c] * w[r, c] for `slice` columns of M rows of x and ROWS of
 * w. Those of x lie side by side, LANES columns of each; rows of w are `row` numbers from each other, the next LANES columns
 * of one `step` numbers behind. A function of its own: GCC then has a register for each sum. */
#define BLOCK(NAME, TYPE, LOAD, M)                                                                                     \
  static __attribute__((noinline)) void NAME##_##M(const float *x, const TYPE *w, int64_t row, int64_t step,           \
                                                   vec (*sums)[ROWS], int is_first, int64_t slice, Ahead ahead) {      \
    const int64_t line = COLUMNS_OF_LINE(TYPE);                                                                        \
    const float *whole = x + slice / line * line * M, *end = x + slice * M;                                            \
    vec acc[M][ROWS];                                                                                                  \
    UNROLLED for (int i = 0; i < M; ++i) UNROLLED for (int r = 0; r < ROWS; ++r) acc[i][r] = (vec){0};                 \
    if (!is_first)                                                                                                     \
      UNROLLED for (int i = 0; i < M; ++i) UNROLLED for (int r = 0; r < ROWS; ++r) acc[i][r] = sums[i][r];             \
    while (x < whole) {                                                                                                \
      for (int r = 0; r < ahead.count; ++r) __builtin_prefetch(ahead.from + r * ahead.row);                            \
      ahead.from += ahead.step;                                                                                        \
      UNROLLED for (int part = 0; part < line / LANES; ++part, x += LANES * M, w += step)                              \
        STEP(M, x, LOAD(w + r * row), 1)                                                                               \
    }                                                                                                                  \
    for (; x < end; x += LANES * M, w += step) STEP(M, x, LOAD(w + r * row), 1)                                        \
    UNROLLED for (int i = 0; i < M; ++i) UNROLLED for (int r = 0; r < ROWS; ++r) sums[i][r] = acc[i][r];               \
  }
#define COLUMNS_OF_LINE(TYPE) (LINE / (int64_t)sizeof(TYPE))

#define BLOCKS(NAME, TYPE, LOAD)                                                                                       \
  BLOCK(NAME, TYPE, LOAD, 1)                                                                                           \
  BLOCK(NAME, TYPE, LOAD, 2)                                                                                           \
  BLOCK(NAME, TYPE, LOAD, 3)                                                                                           \
  IF_FOUR(BLOCK(NAME, TYPE, LOAD, 4))                                                                                  \
  static inline void NAME##_block(int64_t m, const float *x, const TYPE *w, int64_t row, int64_t step,                 \
                                  vec (*sums)[ROWS], int is_first, int64_t slice, Ahead ahead) {                       \
    switch (m) {                                                                                                       \
      case 1: NAME##_1(x, w, row, step, sums, is_first, slice, ahead); break;                                          \
      case 2: NAME##_2(x, w, row, step, sums, is_first, slice, ahead); break;                                          \
      case 3: NAME##_3(x, w, row, step, sums, is_first, slice, ahead); break;                                          \
      IF_FOUR(default: NAME##_4(x, w, row, step, sums, is_first, slice, ahead);)                                       \
    }                                                                                                                  \
  }
BLOCKS(product, float, load)
BLOCKS(product8, int8_t, load8)

/* `slice` columns from `from` on of rows j .. of w as floats, side by side */
typedef void (*Widen)(float *tile, const Product *p, int64_t j, int64_t from, int64_t slice);

/* Columns ROWS * from to ROWS * to of y, for many rows of x, by copies of rows of w: at a distance of a power of 2 they would
 * need the same bank of the cache at once. */
INLINE void in_tiles(const Product *p, int64_t from, int64_t to, Widen widen, int64_t bits) {
  vec sums[PANEL][ROWS];
  float tile[ROWS * TILE] __attribute__((aligned(LINE)));
  Group groups[MOST_GROUPS];
  const int64_t all = find_groups(groups, p->m);
  for (int64_t j = ROWS * from; j < ROWS * to; j += ROWS) {
    for (int64_t c = 0; c < p->k; c += p->slice) {
      const int64_t slice = least(p->k - c, p->slice);
      widen(tile, p, j, c, slice);
      for (const Group *of = groups; of < groups + all; ++of)
        product_block(of->rows, p->x + c * p->m + of->begin * slice, tile, LANES, ROWS * LANES, sums + of->begin, !c, slice,
                      share_of_next(p, *of, j, c, slice, bits, COLUMNS_OF_LINE(float)));
    }
    finish(p, bits == 4 ? NULL : p->scale, j, sums);
  }
}

/* y[i, j] = sum over c of x[i, c] * w[j, c] (* scale[j]) (+ bias[j]). K: a multiple of LANES, N of ROWS. MOST: rows of x, at
 * most, for which those of w are read as they lie. */
#define PRODUCT(NAME, TYPE, LOAD, MOST)                                                                                \
  static inline void NAME##_widen(float *tile, const Product *p, int64_t j, int64_t from, int64_t slice) {             \
    const TYPE *w = (const TYPE *)p->w + j * p->k + from;                                                              \
    for (int64_t c = 0; c < slice; c += LANES)                                                                         \
      for (int r = 0; r < ROWS; ++r, tile += LANES) *(vec *)tile = LOAD(w + r * p->k + c);                             \
  }                                                                                                                    \
  /* columns ROWS * from to ROWS * to of y */                                                                          \
  static void NAME##_columns(const void *with, int64_t from, int64_t to) {                                             \
    const Product *p = with;                                                                                           \
    if (p->m > MOST) {                                                                                                 \
      in_tiles(p, from, to, NAME##_widen, 8 * sizeof(TYPE));                                                           \
      return;                                                                                                          \
    }                                                                                                                  \
    vec sums[MOST][ROWS];                                                                                              \
    Group groups[MOST_GROUPS];                                                                                         \
    const int64_t all = find_groups(groups, p->m);                                                                     \
    for (int64_t j = ROWS * from; j < ROWS * to; j += ROWS) {                                                          \
      for (int64_t c = 0; c < p->k; c += p->slice) {                                                                   \
        const TYPE *w = (const TYPE *)p->w + j * p->k + c;                                                             \
        const int64_t slice = least(p->k - c, p->slice);                                                               \
        for (const Group *of = groups; of < groups + all; ++of)                                                        \
          NAME##_block(of->rows, p->x + c * p->m + of->begin * slice, w, p->k, LANES, sums + of->begin, !c, slice,     \
                       share_of_next(p, *of, j, c, slice, 8 * sizeof(TYPE), COLUMNS_OF_LINE(TYPE)));                   \
      }                                                                                                                \
      finish(p, p->scale, j, sums);                                                                                    \
    }                                                                                                                  \
  }                                                                                                                    \
  /* Not 0: there is no memory. */                                                                                     \
  static int NAME(const float *x, const TYPE *w, const float *scale, const float *bias, float *y, int64_t m,           \
                  int64_t k, int64_t n) {                                                                              \
    const int64_t slice = sizeof(TYPE) == sizeof(float) ? SLICE : TILE;                                                \
    return in_panels(NAME##_columns, MOST, (Product){x, w, scale, bias, y, m, k, n, NULL, 0, slice});                  \
  }

/* Rows of x (M, K) in slices of columns, a slice in groups of rows, of which LANES columns each lie together: rows at a
 * distance of a power of 2 would push each other out of the cache. */
static void side_by_side(float *packed, const float *x, int64_t m, int64_t k, int64_t most) {
  Group groups[MOST_GROUPS];
  const int64_t all = find_groups(groups, m);
  for (int64_t from = 0; from < k; from += most) {
    const int64_t to = least(from + most, k);
    for (const Group *of = groups; of < groups + all; ++of)
      for (int64_t c = from; c < to; c += LANES)
        for (int64_t r = of->begin; r < of->begin + of->rows; ++r, packed += LANES)
          memcpy(packed, x + r * k + c, LANES * sizeof(float));
  }
}

/* A product by `columns`, PANEL rows of x at once; more than `in_place` of them by tiles. Not 0: there is no memory. */
static int in_panels(Work columns, int64_t in_place, Product p) {
  const float *x = p.x;
  const int64_t m = p.m, most = least(m, PANEL), slice = p.slice;
  float *packed = m > 1 ? aligned_alloc(LINE, most * p.k * sizeof(float)) : NULL;
  if (m > 1 && !packed) return 1;
  for (int64_t i = 0; i < m; i += p.m, p.y += p.m * p.n) {
    p.m = least(m - i, most);
    p.slice = p.m > in_place ? TILE : p.m > GROUP ? slice : p.k;
    if (packed) side_by_side(packed, x + i * p.k, p.m, p.k, p.slice);
    p.x = packed ? packed : x;
    in_parallel(columns, &p, p.n / ROWS, p.m * p.n * p.k);
  }
  free(packed);
  return 0;
}

PRODUCT(product, float, load, IN_PLACE)
PRODUCT(product8, int8_t, load8, 2 * GROUP)

/* x (M, K), w (N, K), bias (N,) or none, float32 -> (M, N); K a multiple of LANES, N of ROWS */
int linear(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product(p[0], p[1], NULL, count > 3 ? p[2] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0]);
}

/* the same with w int8 and its scale, (N,), (N, 1) or (1, N), before the bias */
int linear_int8(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  return product8(p[0], p[1], p[2], count > 4 ? p[3] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0]);
}
