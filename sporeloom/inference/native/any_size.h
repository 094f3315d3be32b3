/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of matrices of any size and in batches, for graphs of MindSpore's operators. Each entry is summed in one order, that
 * of its K numbers: MindSpore's own products sum the last rows of a matrix in another one, and those at which it parts a batch
 * among threads. */

#define TALL 6 /* rows of y, with two vectors of its columns, worked on together: 12 sums stay in registers */
#define FLAT 2 /* or as few, with four vectors */

typedef struct {
  const float *x, *w;
  float *y;
  const int64_t *places; /* of each matrix of the batch: where x and w begin */
  int64_t m, k, n, blocks;
  atomic_int *failed;
} Batch;

static inline vec first_of(const float *from, int64_t count) {
  vec v = {0};
  memcpy(&v, from, count * sizeof(float));
  return v;
}

/* Whole matrices, with w (N, K), of sizes that the kernels of few rows take */
static void whole_matrices(const void *with, int64_t from, int64_t to) {
  const Batch p = *(const Batch *)with;
  for (int64_t b = from; b < to; ++b)
    if (product(p.x + p.places[2 * b], p.w + p.places[2 * b + 1], NULL, NULL, p.y + b * p.m * p.n, p.m, p.k, p.n))
      atomic_store(p.failed, 1);
}

/* y[i, r] = sum over c of x[i, c] * w[r][c], for `rows` rows, a constant of the caller, and the first `count` of ROWS columns */
INLINE void tile_of_rows(int rows, const float *x, const float **w, float *y, Batch p, int64_t count) {
  const int64_t whole = p.k / LANES * LANES, rest = p.k - whole;
  vec acc[GROUP][ROWS] = {{{0}}};
  for (int64_t c = 0; c < whole; c += LANES)
    for (int i = 0; i < rows; ++i)
      for (int r = 0; r < ROWS; ++r) acc[i][r] += load(x + i * p.k + c) * load(w[r] + c);
  for (int i = 0; rest && i < rows; ++i)
    for (int r = 0; r < ROWS; ++r) acc[i][r] += first_of(x + i * p.k + whole, rest) * first_of(w[r] + whole, rest);
  for (int i = 0; i < rows; ++i)
    for (int r = 0; r < count; ++r) y[i * p.n + r] = sum(acc[i][r]);
}

/* Blocks of ROWS columns of y (M, N), with w (N, K) */
static void blocks_of_rows(const void *with, int64_t from, int64_t to) {
  const Batch p = *(const Batch *)with;
  for (int64_t piece = from; piece < to; ++piece) {
    const int64_t b = piece / p.blocks, j = piece % p.blocks * ROWS, count = least(ROWS, p.n - j);
    const float *x = p.x + p.places[2 * b], *w[ROWS];
    float *y = p.y + b * p.m * p.n + j;
    for (int r = 0; r < ROWS; ++r) w[r] = p.w + p.places[2 * b + 1] + (j + least(r, count - 1)) * p.k;
    for (int64_t i = 0; i < p.m; i += GROUP, x += GROUP * p.k, y += GROUP * p.n) switch (least(p.m - i, GROUP)) {
        case 1: tile_of_rows(1, x, w, y, p, count); break;
        case 2: tile_of_rows(2, x, w, y, p, count); break;
        case 3: tile_of_rows(3, x, w, y, p, count); break;
        default: tile_of_rows(GROUP, x, w, y, p, count);
      }
  }
}

/* y[i, j] = sum over c of x[i, c] * w[c, j], for `rows` rows and the first `count` columns of `vecs` vectors, the former and the
 * latter constants of the caller; rows of w are `stride` numbers from each other. */
INLINE void tile_of_columns(int rows, int vecs, const float *x, const float *w, int64_t stride, float *y, Batch p,
                            int64_t count) {
  vec acc[TALL][4] = {{{0}}};
  for (int64_t c = 0; c < p.k; ++c, w += stride)
    for (int i = 0; i < rows; ++i)
      for (int v = 0; v < vecs; ++v) acc[i][v] += x[i * p.k + c] * load(w + v * LANES);
  for (int i = 0; i < rows; ++i, y += p.n)
    for (int v = 0; v < vecs && v * LANES < count; ++v)
      memcpy(y + v * LANES, &acc[i][v], least(LANES, count - v * LANES) * sizeof(float));
}

static inline int64_t width_of(int64_t m) { return (m <= FLAT ? 4 : 2) * LANES; }

/* Blocks of columns of y (M, N), with w (K, N). Those of w lie together where they are read often: rows at a distance of a power
 * of 2 push each other out of the cache. The last ones of N are filled up with zeros. */
static void blocks_of_columns(const void *with, int64_t from, int64_t to) {
  const Batch p = *(const Batch *)with;
  const int64_t width = width_of(p.m);
  float *own = p.m > TALL || p.n % width ? aligned_alloc(LINE, p.k * width * sizeof *own) : NULL;
  if (!own && (p.m > TALL || p.n % width)) atomic_store(p.failed, 1);
  for (int64_t piece = from; piece < to && !atomic_load(p.failed); ++piece) {
    const int64_t b = piece / p.blocks, j = piece % p.blocks * width, count = least(width, p.n - j);
    const float *x = p.x + p.places[2 * b], *w = p.w + p.places[2 * b + 1] + j;
    float *y = p.y + b * p.m * p.n + j;
    int64_t stride = p.n;
    if (p.m > TALL || count < width) {
      for (int64_t c = 0; c < p.k; ++c) {
        memcpy(own + c * width, w + c * stride, count * sizeof *own);
        memset(own + c * width + count, 0, (width - count) * sizeof *own);
      }
      w = own;
      stride = width;
    }
    if (p.m == 1) tile_of_columns(1, 4, x, w, stride, y, p, count);
    if (p.m == 2) tile_of_columns(2, 4, x, w, stride, y, p, count);
    for (int64_t i = 0; p.m > FLAT && i < p.m; i += TALL, x += TALL * p.k, y += TALL * p.n) switch (least(p.m - i, TALL)) {
        case 1: tile_of_columns(1, 2, x, w, stride, y, p, count); break;
        case 2: tile_of_columns(2, 2, x, w, stride, y, p, count); break;
        case 3: tile_of_columns(3, 2, x, w, stride, y, p, count); break;
        case 4: tile_of_columns(4, 2, x, w, stride, y, p, count); break;
        case 5: tile_of_columns(5, 2, x, w, stride, y, p, count); break;
        default: tile_of_columns(TALL, 2, x, w, stride, y, p, count);
      }
  }
  free(own);
}

/* Where the matrices of a batch begin; dims of 1 are repeated. `dims`, `shapes`: of x, w and y. */
static void find_places(int64_t *places, int64_t batch, const int *dims, int64_t **shapes) {
  for (int64_t b = 0; b < batch; ++b)
    for (int side = 0; side < 2; ++side) {
      const int shift = dims[2] - dims[side];
      int64_t step = shapes[side][dims[side] - 1] * shapes[side][dims[side] - 2], rest = b, place = 0;
      for (int d = dims[2] - 3; d >= 0; --d) {
        const int64_t at = rest % shapes[2][d], own = d < shift ? 1 : shapes[side][d - shift];
        rest /= shapes[2][d];
        place += own > 1 ? at * step : 0;
        step *= own;
      }
      places[2 * b + side] = place;
    }
}

/* x (..., M, K) or with `x_lies` (..., K, M), w (..., K, N) or with `w_lies` (..., N, K) -> (..., M, N), all float32 */
static int any_size(void **p, const int *dims, int64_t **shapes, int x_lies, int w_lies) {
  const int64_t m = shapes[2][dims[2] - 2], n = shapes[2][dims[2] - 1], k = shapes[0][dims[0] - (x_lies ? 2 : 1)];
  int64_t batch = 1, matrices = 1;
  for (int d = 0; d < dims[2] - 2; ++d) batch *= shapes[2][d];
  for (int d = 0; d < dims[0] - 2; ++d) matrices *= shapes[0][d];
  int64_t *places = malloc(2 * batch * sizeof *places);
  float *turned = x_lies ? malloc(matrices * m * k * sizeof *turned) : NULL, *to = turned;
  atomic_int failed = !places || (x_lies && !turned);
  if (!failed) {
    const float *x = p[0];
    find_places(places, batch, dims, shapes);
    for (int64_t of = 0; x_lies && of < matrices; ++of, x += m * k)
      for (int64_t i = 0; i < m; ++i)
        for (int64_t c = 0; c < k; ++c) *to++ = x[c * m + i];
    const int64_t wide = w_lies ? ROWS : width_of(m), blocks = (n + wide - 1) / wide, cost = batch * m * n * k;
    const Batch with = {x_lies ? turned : p[0], p[1], p[2], places, m, k, n, blocks, &failed};
    if (!w_lies)
      in_parallel(blocks_of_columns, &with, batch * blocks, cost);
    else if (k % LANES || n % ROWS)
      in_parallel(blocks_of_rows, &with, batch * blocks, cost);
    else if (batch >= wanted_threads)
      in_parallel(whole_matrices, &with, batch, cost);
    else
      whole_matrices(&with, 0, batch);
  }
  free(turned);
  free(places);
  return failed;
}

#define ANY_SIZE(NAME, X_LIES, W_LIES)                                                                                 \
  int NAME(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {          \
    for (int i = 0; i < count; ++i)                                                                                    \
      if (strcmp(types[i], "float32")) return 1;                                                                       \
    return any_size(p, dims, shapes, X_LIES, W_LIES);                                                                  \
  }
ANY_SIZE(product_nn, 0, 0)
ANY_SIZE(product_nt, 0, 1)
ANY_SIZE(product_tn, 1, 0)
ANY_SIZE(product_tt, 1, 1)
