/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of matrices of any size and in batches, for graphs of MindSpore's operators. Each entry is summed in one order, that
 * of its K numbers: MindSpore's own products sum the last rows of a matrix in another one, and those at which it parts a batch
 * among threads. */

typedef struct {
  const float *x, *w;
  float *y;
  const int64_t *places; /* of each matrix of the batch: where x and w begin */
  int64_t m, k, n, blocks;
} Batch;

static inline vec first_of(const float *from, int64_t count) {
  vec v = {0};
  memcpy(&v, from, count * sizeof(float));
  return v;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Blocks of ROWS columns of y (M, N), with w (N, K) */
static void blocks_of_rows(const void *with, int64_t from, int64_t to) {
  const Batch p = *(const Batch *)with;
  const int64_t whole = p.k / LANES * LANES;
  for (int64_t piece = from; piece < to; ++piece) {
    const int64_t b = piece / p.blocks, j = piece % p.blocks * ROWS;
    const float *x = p.x + p.places[2 * b], *w[ROWS];
    float *y = p.y + b * p.m * p.n + j;
    for (int r = 0; r < ROWS; ++r) w[r] = p.w + p.places[2 * b + 1] + least(j + r, p.n - 1) * p.k;
    for (int64_t i = 0; i < p.m; ++i, x += p.k, y += p.n) {
      vec acc[ROWS] = {{0}};
      for (int64_t c = 0; c < whole; c += LANES)
        for (int r = 0; r < ROWS; ++r) acc[r] += load(x + c) * load(w[r] + c);
      for (int r = 0; whole < p.k && r < ROWS; ++r)
        acc[r] += first_of(x + whole, p.k - whole) * first_of(w[r] + whole, p.k - whole);
      for (int r = 0; r < ROWS && j + r < p.n; ++r) y[r] = sum(acc[r]);
    }
  }
}

/* Blocks of LANES columns of y (M, N), with w (K, N); the last one begins earlier, so that it is whole. */
static void blocks_of_columns(const void *with, int64_t from, int64_t to) {
  const Batch p = *(const Batch *)with;
  for (int64_t piece = from; piece < to; ++piece) {
    const int64_t b = piece / p.blocks, first = piece % p.blocks * LANES, wide = least(LANES, p.n);
    const int64_t j = least(first, p.n - wide);
    const float *w = p.w + p.places[2 * b + 1] + j;
    for (int64_t i = 0; i < p.m; i += ROWS) {
      const float *x[ROWS];
      vec acc[ROWS] = {{0}};
      for (int r = 0; r < ROWS; ++r) x[r] = p.x + p.places[2 * b] + least(i + r, p.m - 1) * p.k;
      for (int64_t c = 0; c < p.k; ++c) {
        const vec column = wide == LANES ? load(w + c * p.n) : first_of(w + c * p.n, wide);
        for (int r = 0; r < ROWS; ++r) acc[r] += x[r][c] * column;
      }
      for (int r = 0; r < ROWS && i + r < p.m; ++r)
        memcpy(p.y + (b * p.m + i + r) * p.n + first, (const float *)&acc[r] + first - j, (wide - first + j) * sizeof(float));
    }
  }
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
  float *turned = x_lies ? malloc(matrices * m * k * sizeof *turned) : NULL;
  int failed = !places || (x_lies && !turned);
  if (!failed) {
    const float *x = p[0];
    find_places(places, batch, dims, shapes);
    for (int64_t at = 0; x_lies && at < matrices * m * k; ++at)
      turned[at] = x[at / (m * k) * m * k + at % k * m + at / k % m];
    const int64_t wide = w_lies ? ROWS : LANES, blocks = (n + wide - 1) / wide;
    const Batch with = {x_lies ? turned : x, p[1], p[2], places, m, k, n, blocks};
    if (w_lies && k % LANES == 0 && n % ROWS == 0)
      for (int64_t b = 0; b < batch; ++b)
        failed |= product(with.x + places[2 * b], with.w + places[2 * b + 1], NULL, NULL, with.y + b * m * n, m, k, n);
    else
      in_parallel(w_lies ? blocks_of_rows : blocks_of_columns, &with, batch * blocks, batch * m * n * k);
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
