/* SPDX-License-Identifier: Apache-2.0
 * What decoding spends its time on, for one CPU: products of a few rows with large matrices, and attention of single queries
 * over a cache. MindSpore calls these through its Custom operator; outputs follow the inputs in `p`.
 *
 * A row's numbers do not depend on the other rows: each entry is summed in one order, in LANES parts.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h> /* compilers do not find the widening of bytes by themselves */
#endif

#define LANES 16
#define WORTH_THREADS (1 << 19) /* products of two numbers; less is done before a second thread has begun */
#define AHEAD 4096 /* bytes */
#define ROWS 4 /* of x, and columns of y, worked on together: 16 sums stay in registers */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));

static inline vec load(const float *from) { return *(const vec *)from; }
#if defined(__AVX512F__)
static inline vec load8(const int8_t *from) {
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
#elif defined(__AVX2__)
static inline vec load8(const int8_t *from) {
  vec v;
  for (int i = 0; i < LANES; i += 8) {
    __m256 part = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + i))));
    memcpy((float *)&v + i, &part, sizeof part);
  }
  return v;
}
#else
static inline vec load8(const int8_t *from) {
  vec v;
  for (int i = 0; i < LANES; ++i) v[i] = from[i];
  return v;
}
#endif

static inline float sum(vec v) {
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += v[i];
  return total;
}

/* y[i, j] = sum over c of x[i, c] * w[j, c] (* scale[j]) (+ bias[j]), for M rows of x and R of w. K: a multiple of LANES. */
#define BLOCK(NAME, TYPE, LOAD, M, R)                                                                                  \
  static void NAME##_##M(const float *x, const TYPE *w, const float *scale, const float *bias, float *y, int64_t k,    \
                         int64_t n) {                                                                                  \
    vec acc[M][R] = {{{0}}};                                                                                           \
    for (int64_t c = 0; c < k; c += LANES) {                                                                           \
      vec in[R];                                                                                                       \
      for (int r = 0; r < R; ++r) {                                                                                    \
        __builtin_prefetch((const char *)(w + r * k + c) + AHEAD);                                                     \
        in[r] = LOAD(w + r * k + c);                                                                                   \
      }                                                                                                                \
      for (int i = 0; i < M; ++i) {                                                                                    \
        vec xi = load(x + i * k + c);                                                                                  \
        for (int r = 0; r < R; ++r) acc[i][r] += xi * in[r];                                                           \
      }                                                                                                                \
    }                                                                                                                  \
    for (int i = 0; i < M; ++i)                                                                                        \
      for (int r = 0; r < R; ++r) y[i * n + r] = sum(acc[i][r]) * (scale ? scale[r] : 1.0f) + (bias ? bias[r] : 0.0f); \
  }
#define PRODUCT(NAME, TYPE, LOAD)                                                                                      \
  BLOCK(NAME, TYPE, LOAD, 1, ROWS)                                                                                     \
  BLOCK(NAME, TYPE, LOAD, 2, ROWS)                                                                                     \
  BLOCK(NAME, TYPE, LOAD, 3, ROWS)                                                                                     \
  BLOCK(NAME, TYPE, LOAD, 4, ROWS)                                                                                     \
  static void NAME(const float *x, const TYPE *w, const float *scale, const float *bias, float *y, int64_t m,          \
                   int64_t k, int64_t n) {                                                                             \
    _Pragma("omp parallel for schedule(static) if (m * n * k > WORTH_THREADS)") for (int64_t j = 0; j < n; j += ROWS) {\
      const float *s = scale ? scale + j : NULL, *b = bias ? bias + j : NULL;                                          \
      for (int64_t i = 0; i < m; i += ROWS) {                                                                          \
        const float *xi = x + i * k;                                                                                   \
        float *yi = y + i * n + j;                                                                                     \
        switch (m - i) {                                                                                               \
          case 1: NAME##_1(xi, w + j * k, s, b, yi, k, n); break;                                                      \
          case 2: NAME##_2(xi, w + j * k, s, b, yi, k, n); break;                                                      \
          case 3: NAME##_3(xi, w + j * k, s, b, yi, k, n); break;                                                      \
          default: NAME##_4(xi, w + j * k, s, b, yi, k, n);                                                            \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }
PRODUCT(product, float, load)
PRODUCT(product8, int8_t, load8)

/* x (M, K), w (N, K), bias (N,) or none, float32 -> (M, N); K a multiple of LANES, N of ROWS */
int linear(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  product(p[0], p[1], NULL, count > 3 ? p[2] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0]);
  return 0;
}

/* the same with w int8 and its scale, (N,), (N, 1) or (1, N), before the bias */
int linear_int8(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  product8(p[0], p[1], p[2], count > 4 ? p[3] : NULL, p[count - 1], shapes[0][0], shapes[0][1], shapes[1][0]);
  return 0;
}

/* e^v for v <= 0; 0 below -87. Source: Cephes' expf. */
static inline vec exp_of(vec v) {
  ivec tiny = v < -87.0f;
  v = (vec)(((ivec)v & ~tiny));
  vec z = v * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
  ivec n = (ivec)z - 0x4B400000;
  z -= 12582912.0f;
  v = v - z * 0.693359375f + z * 2.12194440e-4f;
  vec p = v * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * v + 8.3334519073e-3f;
  p = p * v + 4.1665795894e-2f;
  p = p * v + 1.6666665459e-1f;
  p = p * v + 5.0000001201e-1f;
  p = p * v * v + v + 1.0f;
  vec power = (vec)((n + 127) << 23);
  return (vec)((ivec)(p * power) & ~tiny);
}

#define HIDDEN -5000.0f /* bias is 0 or -10000 */

/* q (B, H, 1, D), k, v (B, KV, 1, D), the caches keys and values (R, KV, S, D), slots (B, KV, 1, 3) int32: row, head and
 * slot of each new key, bias (B, 1, 1, S) -> (B, H, 1, D); D a multiple of LANES. Writes k and v into the caches, in place:
 * MindSpore's ScatterNdUpdate copies a cache with every token. What lies behind the last key that counts is not read. */
int attend(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  const float *q = p[0], *new_keys = p[1], *new_values = p[2], *bias = p[6];
  float *keys = p[3], *values = p[4], *y = p[7];
  const int32_t *slots = p[5];
  const int64_t batch = shapes[0][0], heads = shapes[0][1], d = shapes[0][3], kv = shapes[3][1], length = shapes[3][2];
  const int64_t work = batch * heads * length * d * 2, group = heads / kv;
  const float scale = 1.0f / sqrtf((float)d);
  int failed = 0;
  for (int64_t i = 0; i < batch * kv; ++i) {
    const int32_t *to = slots + 3 * i;
    const int64_t place = ((to[0] * kv + to[1]) * length + to[2]) * d;
    memcpy(keys + place, new_keys + i * d, d * sizeof(float));
    memcpy(values + place, new_values + i * d, d * sizeof(float));
  }
#pragma omp parallel for schedule(static) reduction(| : failed) if (work > WORTH_THREADS)
  for (int64_t bh = 0; bh < batch * heads; ++bh) {
    const int64_t b = bh / heads, row = slots[3 * b * kv], of = row * kv + bh % heads / group;
    const float *qi = q + bh * d, *k = keys + of * length * d, *v = values + of * length * d, *hidden = bias + b * length;
    float *out = y + bh * d, top = -INFINITY, total;
    int64_t last = length;
    while (last > 1 && hidden[last - 1] < HIDDEN) --last;
    const int64_t padded = (last + LANES - 1) / LANES * LANES;
    float *probs = malloc(padded * sizeof(float));
    if (!probs) {
      failed = 1;
      continue;
    }
    for (int64_t s = 0; s < last; ++s) {
      vec acc = {0};
      for (int64_t c = 0; c < d; c += LANES) acc += load(qi + c) * load(k + s * d + c);
      probs[s] = sum(acc) * scale + hidden[s];
      top = probs[s] > top ? probs[s] : top;
    }
    for (int64_t s = last; s < padded; ++s) probs[s] = -INFINITY;
    vec all = {0};
    for (int64_t s = 0; s < padded; s += LANES) {
      vec e = exp_of(load(probs + s) - top);
      *(vec *)(probs + s) = e;
      all += e;
    }
    total = 1.0f / sum(all);
    for (int64_t c = 0; c < d; c += LANES) {
      vec acc = {0};
      for (int64_t s = 0; s < last; ++s) acc += probs[s] * load(v + s * d + c);
      *(vec *)(out + c) = acc * total;
    }
    free(probs);
  }
  return failed;
}
