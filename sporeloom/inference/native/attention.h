/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of a few new tokens over a KV cache of float32 or int8. */
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

/* Tokens of a call: `all`, `tokens` of each row, the last only filling up the shape where `all` is less; heads of queries;
 * heads and slots of a cache, (rows, kv, length, d). */
typedef struct {
  int64_t all, tokens, heads, kv, length, d;
} Sizes;

/* Of floats, or of int8 with the scale of each vector. */
typedef struct {
  void *keys, *values;
  float *key_scales, *value_scales;
} Cache;

typedef struct {
  Sizes of;
  Cache cache;
  const float *q, *bias;
  const int32_t *slots;
  float *y;
  atomic_int *failed;
} Attention;

/* parts * LANES columns of values (S, D), weighted, times `factor` -> y */
#define PARTS 8 /* vectors of a head that are mixed at once: each sum waits for its last addition */
#define MIX(NAME, TYPE, LOAD)                                                                                          \
  static inline void NAME(const float *weights, const TYPE *values, int64_t s, int64_t d, float factor, float *y,      \
                          int parts) {                                                                                 \
    vec acc[PARTS] = {{0}};                                                                                            \
    for (int64_t i = 0; i < s; ++i, values += d)                                                                       \
      for (int r = 0; r < parts; ++r) acc[r] += weights[i] * LOAD(values + r * LANES);                                 \
    for (int r = 0; r < parts; ++r) *(vec *)(y + r * LANES) = acc[r] * factor;                                         \
  }                                                                                                                    \
  /* q times each of `count` keys (S, D) -> scores, of which ROWS - 1 more may be written. All in the same way, ROWS at \
   * once: a compiler may round the products of a single sum, but not those of several. */                             \
  static void NAME##_scores(const float *q, const TYPE *keys, int64_t count, int64_t d, float *scores) {               \
    for (int64_t s = 0; s < count; s += ROWS) {                                                                        \
      const TYPE *of[ROWS];                                                                                            \
      vec acc[ROWS] = {{0}};                                                                                           \
      for (int r = 0; r < ROWS; ++r) of[r] = keys + least(s + r, count - 1) * d;                                       \
      for (int64_t c = 0; c < d; c += LANES)                                                                           \
        UNROLLED for (int r = 0; r < ROWS; ++r) acc[r] += load(q + c) * LOAD(of[r] + c);                               \
      const quarter all = sums_of_rows(acc);                                                                           \
      memcpy(scores + s, &all, sizeof all);                                                                            \
    }                                                                                                                  \
  }                                                                                                                    \
  static void NAME##_all(const float *weights, const TYPE *values, int64_t s, int64_t d, float factor, float *y) {     \
    int64_t c = 0;                                                                                                     \
    for (; d - c >= PARTS * LANES; c += PARTS * LANES) NAME(weights, values + c, s, d, factor, y + c, PARTS);          \
    for (; d - c >= ROWS * LANES; c += ROWS * LANES) NAME(weights, values + c, s, d, factor, y + c, ROWS);             \
    for (; c < d; c += LANES) NAME(weights, values + c, s, d, factor, y + c, 1);                                       \
  }
MIX(mix, float, load)
MIX(mix8, int8_t, load8)

/* Heads of queries from .. to of all: those of one head together, whose keys and values may be the same. */
static void attend_heads(const void *with, int64_t from, int64_t to) {
  const Attention p = *(const Attention *)with;
  const int64_t d = p.of.d, kv = p.of.kv, heads = p.of.heads, length = p.of.length, tokens = p.of.tokens;
  const float scale = 1.0f / sqrtf((float)d);
  float *probs = malloc((length + LANES) * sizeof(float));
  if (!probs) {
    atomic_store(p.failed, 1);
    return;
  }
  for (int64_t i = from; i < to; ++i) {
    const int64_t token = i % p.of.all, head = i / p.of.all, row = p.slots[3 * (token / tokens) * kv * tokens];
    const int64_t slot = (row * kv + head / (heads / kv)) * length, at = slot * d, place = (token * heads + head) * d;
    const float *q = p.q + place, *hidden = p.bias + token * length;
    const float *k = (const float *)p.cache.keys + at, *v = (const float *)p.cache.values + at;
    const int8_t *k8 = (const int8_t *)p.cache.keys + at, *v8 = (const int8_t *)p.cache.values + at;
    const float *of_k = p.cache.key_scales ? p.cache.key_scales + slot : NULL;
    const float *of_v = p.cache.key_scales ? p.cache.value_scales + slot : NULL;
    float *out = p.y + place, top = -INFINITY, total;
    int64_t last = length;
    while (last > 1 && hidden[last - 1] < HIDDEN) --last;
    const int64_t padded = (last + LANES - 1) / LANES * LANES;
    if (of_k)
      mix8_scores(q, k8, last, d, probs);
    else
      mix_scores(q, k, last, d, probs);
    for (int64_t s = 0; s < last; ++s) {
      probs[s] = (of_k ? probs[s] * of_k[s] : probs[s]) * scale + hidden[s];
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
    for (int64_t s = 0; of_v && s < last; ++s) probs[s] *= of_v[s];
    if (of_v)
      mix8_all(probs, v8, last, d, total, out);
    else
      mix_all(probs, v, last, d, total, out);
  }
  free(probs);
}

/* q (B, T, H, D), new keys and values (B, T, KV, D), slots (B, KV, T, 3): row, head and slot of each new key, bias (B, T, S)
 * -> y (B, T, H, D); D a multiple of LANES. Writes the new keys and values into the caches, in place: MindSpore's
 * ScatterNdUpdate copies a cache with every token. What lies behind the last key that counts is not read. Not 0: there is no
 * memory. */
static int attention(Sizes of, const float *q, const float *new_keys, const float *new_values, Cache cache,
                     const int32_t *slots, const float *bias, float *y) {
  const int64_t d = of.d, kv = of.kv, tokens = of.tokens, heads = of.all * of.heads;
  for (int64_t i = 0; i < of.all * kv; ++i) {
    const int64_t token = i / kv, head = i % kv, from = i * d;
    const int32_t *to = slots + 3 * ((token / tokens * kv + head) * tokens + token % tokens);
    const int64_t slot = (to[0] * kv + to[1]) * of.length + to[2], place = slot * d;
    if (cache.key_scales) {
      cache.key_scales[slot] = quantize(new_keys + from, (int8_t *)cache.keys + place, d);
      cache.value_scales[slot] = quantize(new_values + from, (int8_t *)cache.values + place, d);
    } else {
      memcpy((float *)cache.keys + place, new_keys + from, d * sizeof(float));
      memcpy((float *)cache.values + place, new_values + from, d * sizeof(float));
    }
  }
  atomic_int failed = 0;
  const Attention with = {of, cache, q, bias, slots, y, &failed};
  in_parallel(attend_heads, &with, heads, heads * of.length * d * 2);
  return failed;
}

/* q (B, H, 1, D), k, v (B, KV, 1, D), the caches keys and values (R, KV, S, D), slots (B, KV, 1, 3) int32, bias (B, 1, 1, S)
 * -> (B, H, 1, D) */
int attend(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  const Sizes of = {shapes[0][0], 1, shapes[0][1], shapes[3][1], shapes[3][2], shapes[0][3]};
  return attention(of, p[0], p[1], p[2], (Cache){p[3], p[4], NULL, NULL}, p[5], p[6], p[7]);
}

/* the same with caches of int8, their scales (R, KV, S, 1) behind them */
int attend_int8(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  const Sizes of = {shapes[0][0], 1, shapes[0][1], shapes[3][1], shapes[3][2], shapes[0][3]};
  return attention(of, p[0], p[1], p[2], (Cache){p[3], p[4], p[5], p[6]}, p[7], p[8], p[9]);
}
