/* SPDX-License-Identifier: Apache-2.0
 * What decoding spends its time on, for one CPU: whole layers for a few tokens; and their parts, for layers that are not made
 * of those known here. MindSpore calls these through its Custom operator; outputs follow the inputs in `p`.
 *
 * threads.h has the threads, products.h, int4.h and w8a8.h products with matrices, any_size.h those of any size and in batches,
 * attention.h attention over a KV cache, experts.h experts; whole layers are here.
 *
 * A row's numbers do not depend on the other rows: each entry is summed in one order, in LANES parts.
 */
#define _GNU_SOURCE
#include <float.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h> /* compilers do not find the widening of bytes by themselves */
#endif

#include "threads.h"
#include "products.h"
#include "int4.h"
#include "w8a8.h"
#include "attention.h"
#include "any_size.h"

/* What a layer is made of, as sporeloom/inference/kernels.py writes it; each an int32. */
enum {
  NORM_RMS, NORM_BIAS, KIND, ACTIVATION, GATED, WEIGHTS, QKV_BIAS, OUTPUT_BIAS, MLP_BIAS, ROTATED, ADJACENT, HEADS, FEATURES, EPSILON, CACHE_INT8
};
enum { SEQUENTIAL, PARALLEL, SANDWICH };
enum { GELU, GELU_TANH, FAST_GELU, SILU };
enum { IN_FLOAT, IN_INT8, IN_W8A8, IN_INT4, IN_INT4_ZEROS };

/* The next inputs of a layer. */
typedef struct {
  void **p;
  int64_t **shapes;
  const int32_t *plan;
  int at, failed;
} Inputs;

/* A matrix (N, K), or those of all experts, in the kind of the plan; groups: of the columns of int4. */
typedef struct {
  const void *w;
  const float *scale, *bias;
  const uint8_t *zero;
  int64_t k, n, groups;
} Matrix;

/* The next inputs as a matrix, behind `outer` dims of them. */
static Matrix next_matrix(Inputs *in, int outer, int has_bias) {
  const int kind = in->plan[WEIGHTS];
  const int64_t *of = in->shapes[in->at] + outer;
  Matrix w = {.w = in->p[in->at++], .n = of[0], .k = kind >= IN_INT4 ? of[1] * 2 * MOST_LANES : of[1]};
  w.groups = kind >= IN_INT4 ? in->shapes[in->at][1 + outer] : 1;
  if (kind) w.scale = in->p[in->at++];
  if (kind == IN_INT4_ZEROS) w.zero = in->p[in->at++];
  if (has_bias) w.bias = in->p[in->at++];
  return w;
}

/* x (M, K) times a matrix -> y (M, N). Not 0: there is no memory. */
static int times(Matrix w, int kind, const float *x, float *y, int64_t m) {
  return kind >= IN_INT4   ? product4(x, w.w, w.scale, w.zero, w.bias, y, m, w.k, w.n, w.groups)
         : kind == IN_W8A8 ? product_w8a8(x, w.w, w.scale, w.bias, y, m, w.k, w.n)
         : kind == IN_INT8 ? product8(x, w.w, w.scale, w.bias, y, m, w.k, w.n)
                           : product(x, w.w, w.scale, w.bias, y, m, w.k, w.n);
}

/* x (M, K) times the next matrix -> y (M, N) */
static void next_product(Inputs *in, const float *x, float *y, int64_t m, int has_bias) {
  const Matrix w = next_matrix(in, 0, has_bias);
  in->failed |= times(w, in->plan[WEIGHTS], x, y, m);
}

/* The next norm of each row of x (M, D) -> y */
static void next_norm(Inputs *in, const float *x, float *y, int64_t m, int64_t d) {
  const float *weight = in->p[in->at++], *bias = in->plan[NORM_BIAS] ? in->p[in->at++] : NULL;
  float epsilon;
  memcpy(&epsilon, in->plan + EPSILON, sizeof epsilon);
  for (int64_t i = 0; i < m; ++i, x += d, y += d) {
    float mean = 0.0f;
    if (!in->plan[NORM_RMS]) {
      vec all = {0};
      for (int64_t c = 0; c < d; c += LANES) all += load(x + c);
      mean = sum(all) / d;
    }
    vec squares = {0};
    for (int64_t c = 0; c < d; c += LANES) squares += (load(x + c) - mean) * (load(x + c) - mean);
    const float factor = 1.0f / sqrtf(sum(squares) / d + epsilon);
    for (int64_t c = 0; c < d; c += LANES) {
      vec v = (load(x + c) - mean) * factor * load(weight + c);
      *(vec *)(y + c) = bias ? v + load(bias + c) : v;
    }
  }
}

/* 1 / (1 + e^-v) */
static inline vec sigmoid(vec v) {
  ivec negative = v < 0.0f;
  vec e = exp_of((vec)(((ivec)v & negative) | ((ivec)-v & ~negative))); /* of -|v| */
  vec far = e / (1.0f + e), near = 1.0f / (1.0f + e);
  return (vec)(((ivec)far & negative) | ((ivec)near & ~negative));
}

static inline vec activated(vec v, int kind) {
  if (kind == SILU) return v * sigmoid(v);
  if (kind == FAST_GELU) return v * sigmoid(v * 1.702f);
  if (kind == GELU_TANH) /* 0.5 (1 + tanh(u)) = sigmoid(2 u) */
    return v * sigmoid(1.5957691216057308f * (v + 0.044715f * v * v * v));
  vec y;
  for (int i = 0; i < LANES; ++i) y[i] = 0.5f * v[i] * (1.0f + erff(v[i] * 0.70710678118654752f));
  return y;
}

typedef struct {
  float *up, *gate;
  int kind;
} Features;

static void activate(const void *with, int64_t from, int64_t to) {
  const Features p = *(const Features *)with;
  for (int64_t c = LANES * from; c < LANES * to; c += LANES) {
    vec v = load(p.up + c);
    *(vec *)(p.up + c) = p.gate ? v * activated(load(p.gate + c), p.kind) : activated(v, p.kind);
  }
}

/* The next MLP of x (M, D) -> y (M, D); wide: room for 2 (M, F) */
static void next_mlp(Inputs *in, const float *x, float *y, float *wide, int64_t m, int64_t f) {
  const Features with = {wide, in->plan[GATED] ? wide + m * f : NULL, in->plan[ACTIVATION]};
  next_product(in, x, wide, m, in->plan[MLP_BIAS]);
  if (with.gate) next_product(in, x, with.gate, m, in->plan[MLP_BIAS]);
  in_parallel(activate, &with, m * f / LANES, m * f * 16);
  next_product(in, wide, y, m, in->plan[MLP_BIAS]);
}

/* Turn the heads of x (M, H, D) by cos and sin (M, D), in place; as sporeloom/nn/rotary.py. */
static void rotate(float *x, const float *cos, const float *sin, int64_t m, int64_t heads, int64_t d, const int32_t *plan) {
  const int64_t half = plan[ROTATED] / 2;
  float pairs[1024]; /* the longest head there may be */
  for (int64_t i = 0; i < m * heads; ++i, x += d) {
    const float *c = cos + i / heads * d, *s = sin + i / heads * d;
    memcpy(pairs, x, d * sizeof(float));
    for (int64_t j = 0; plan[ADJACENT] && j < half; ++j) {
      pairs[j] = x[2 * j];
      pairs[half + j] = x[2 * j + 1];
    }
    for (int64_t j = 0; j < half; ++j) {
      x[j] = pairs[j] * c[j] + pairs[half + j] * s[j];
      x[half + j] = pairs[half + j] * c[half + j] + pairs[j] * s[half + j];
    }
    for (int64_t j = 2 * half; j < d; ++j) x[j] = pairs[j] * c[j];
  }
}

static void add(float *x, const float *y, int64_t n) {
  for (int64_t c = 0; c < n; c += LANES) *(vec *)(x + c) = load(x + c) + load(y + c);
}

/* Tokens of m but the last ones whose keys go to the spare slot, the last of a row's: they only fill up a shape. */
static int64_t that_count(const int32_t *slots, int64_t m, int64_t tokens, int64_t kv, int64_t length) {
  while (m > 1 && slots[3 * ((m - 1) / tokens * kv * tokens + (m - 1) % tokens) + 2] == length - 1) --m;
  return m;
}

/* A whole layer for T tokens of each row: x (B*T, D), bias (B, 1, T, S), slots (B, KV, T, 3), cos and sin (B, T, 1, D/H) or
 * anything, the caches (R, KV, S, D/H) and, of int8, their scales, then parameters in the order of use, and the plan -> (B*T, D). */
int layer(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  const int32_t *plan = p[count - 2];
  const int64_t d = shapes[0][1], tokens = shapes[1][2], kv = shapes[5][1], length = shapes[5][2], head = shapes[5][3];
  const int64_t m = that_count(p[2], shapes[0][0], tokens, kv, length);
  const Sizes of = {m, tokens, plan[HEADS], kv, length, head};
  const int has_two = plan[KIND] == SANDWICH;
  const int64_t wide = plan[HEADS] * head, narrow = kv * head, f = plan[FEATURES];
  const Cache cache = {p[5], p[6], plan[CACHE_INT8] ? p[7] : NULL, plan[CACHE_INT8] ? p[8] : NULL};
  Inputs in = {p, shapes, plan, plan[CACHE_INT8] ? 9 : 7, 0};
  float *x = p[count - 1];
  float *a = aligned_alloc(LINE, m * (2 * d + 2 * wide + 2 * narrow + 2 * f) * sizeof(float));
  if (!a) return 1;
  float *y = a + m * d, *q = y + m * d, *context = q + m * wide, *k = context + m * wide, *v = k + m * narrow;
  float *features = v + m * narrow;
  memcpy(x, p[0], shapes[0][0] * d * sizeof(float));
  next_norm(&in, x, a, m, d);
  next_product(&in, a, q, m, plan[QKV_BIAS]);
  next_product(&in, a, k, m, plan[QKV_BIAS]);
  next_product(&in, a, v, m, plan[QKV_BIAS]);
  if (plan[ROTATED]) {
    rotate(q, p[3], p[4], m, plan[HEADS], head, plan);
    rotate(k, p[3], p[4], m, kv, head, plan);
  }
  in.failed |= attention(of, q, k, v, cache, p[2], p[1], context);
  next_product(&in, context, y, m, plan[OUTPUT_BIAS]);
  if (has_two) next_norm(&in, y, y, m, d);
  add(x, y, m * d);
  if (plan[KIND] != PARALLEL) next_norm(&in, x, a, m, d);
  next_mlp(&in, a, y, features, m, f);
  if (has_two) next_norm(&in, y, y, m, d);
  add(x, y, m * d);
  free(a);
  return in.failed;
}

#include "experts.h"
