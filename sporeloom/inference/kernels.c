/* SPDX-License-Identifier: Apache-2.0
 * What decoding spends its time on, for one CPU: whole layers for a few tokens; and their parts, for layers that are not made
 * of those known here. MindSpore calls these through its Custom operator; outputs follow the inputs in `p`.
 *
 * A row's numbers do not depend on the other rows: each entry is summed in one order, in LANES parts.
 */
#define _GNU_SOURCE
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

#define LANES 16
#define WORTH_THREADS (1 << 17) /* products of two numbers; less is done before a second thread has begun */
#define MOST_THREADS 64
#define LEAST_PIECES 4 /* of work that a thread takes at once */
#define LINE 64 /* bytes of the cache */
#define ROWS 4 /* of x, and columns of y, worked on together: 16 sums stay in registers */
#define SLICE 512 /* columns of x worked on at once */
#define PANEL 64 /* rows of x worked on at once */

/* Threads of our own. Those of OpenMP sleep after each product when MindSpore has threads, too, and a layer has many: to wake
 * them took longer than the products of int8.
 *
 * A call is over when its pieces are done, not when every thread has come: one that the system gives no core costs nothing
 * unless it holds a piece. When it does, the caller waits for as long as somebody else computes, some 3 ms where a product
 * takes 0.1. So threads offer their core to others between two pieces; and when one is missed all the same, the caller goes on
 * with a thread less for a while, which sleeps, so that the others keep their cores. */
#define SPINS 4000 /* some 100 microseconds that a thread looks for more to do before it sleeps */
#define OFFER_NS 1000000 /* computed in one go, before a thread offers its core */
#define MISSED_NS 300000 /* waited for the last pieces, and longer than for its own: a thread has lost its core */
#define FIRST_WAIT_NS 20000000 /* until as many threads as before are tried again; twice as long each time that fails */
#define LONGEST_WAIT_NS 640000000
typedef void (*Work)(const void *with, int64_t from, int64_t to);
static struct {
  pthread_mutex_t one_at_a_time;
  int threads;               /* with the caller; 0: not started yet */
  atomic_uint turn, active;  /* number of the call; threads that may take part, with the caller. Threads sleep on both */
  atomic_int sleeping;       /* of those that may take part */
  atomic_ullong claim;       /* number of the call << 32 | first piece that nobody took: in one word, for a thread that
                                comes late must not take a piece of another call */
  atomic_llong count, done;  /* pieces */
  _Atomic(Work) work;
  _Atomic(const void *) with;
  int64_t wait_ns, retry_at; /* how long with a thread less, and until when */
} pool = {.one_at_a_time = PTHREAD_MUTEX_INITIALIZER};

static inline void pause_briefly(void) {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void wait_for_change(atomic_uint *word, unsigned seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void wake_all(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MOST_THREADS, NULL, NULL, 0); }

/* Smaller and smaller parts of what is left: memory is not as fast for one thread as for another. `offered`: when this thread
 * last offered its core; none for the caller, whom the others wait for. */
static void do_share(int64_t *offered) {
  for (unsigned long long claim = atomic_load(&pool.claim);;) {
    if (offered && now_ns() - *offered > OFFER_NS) {
      sched_yield();
      *offered = now_ns();
      claim = atomic_load(&pool.claim);
    }
    const long long from = claim & UINT32_MAX, count = atomic_load(&pool.count);
    if (from >= count) return;
    const Work work = atomic_load(&pool.work);
    const void *with = atomic_load(&pool.with);
    const long long part = (count - from) / (2 * pool.threads);
    long long to = from + (part > LEAST_PIECES ? part : LEAST_PIECES);
    if (to > count) to = count;
    if (!atomic_compare_exchange_strong(&pool.claim, &claim, claim - from + to)) continue;
    work(with, from, to); /* of this call, which is not over before */
    atomic_fetch_add(&pool.done, to - from);
    claim = atomic_load(&pool.claim);
  }
}

static void *serve(void *number) {
  const unsigned mine = (unsigned)(uintptr_t)number;
  int64_t offered = now_ns();
  for (unsigned seen = 0, turn, active;; seen = turn) {
    for (int spins = 0; (turn = atomic_load(&pool.turn)) == seen; ++spins) {
      if ((active = atomic_load(&pool.active)) <= mine) {
        wait_for_change(&pool.active, active);
      } else if (spins < SPINS) {
        pause_briefly();
      } else {
        atomic_fetch_add(&pool.sleeping, 1);
        wait_for_change(&pool.turn, seen);
        atomic_fetch_sub(&pool.sleeping, 1);
      }
    }
    if (atomic_load(&pool.active) > mine) do_share(&offered);
  }
  return NULL;
}

static void forget_threads(void) { /* a forked child has none */
  pthread_mutex_init(&pool.one_at_a_time, NULL);
  pool.threads = 0;
  pool.turn = 0;
  pool.sleeping = 0;
}

static int wanted_threads = 1;
/* How many to compute with; to be said before the first product. */
void use_threads(int count) { wanted_threads = count < 1 ? 1 : count > MOST_THREADS ? MOST_THREADS : count; }

static void start_threads(void) {
  static int forks_are_known;
  if (!forks_are_known) forks_are_known = !pthread_atfork(NULL, NULL, forget_threads);
  pool.active = wanted_threads;
  pool.wait_ns = FIRST_WAIT_NS;
  pool.threads = 1;
  for (pthread_t thread; pool.threads < wanted_threads; ++pool.threads) {
    if (pthread_create(&thread, NULL, serve, (void *)(uintptr_t)pool.threads)) break;
    pthread_detach(thread);
  }
  pool.active = pool.threads;
}

/* The caller's own pieces, `began` then, are done: wait for those of the others, and see whether one has lost its core. */
static void wait_for_others(int64_t began) {
  int64_t since = 0;
  for (int spins = 0; atomic_load(&pool.done) < pool.count; ++spins) {
    if (spins < SPINS) {
      pause_briefly();
    } else {
      if (!since) since = now_ns();
      sched_yield();
    }
  }
  if (!since) return;
  const int64_t now = now_ns();
  if (now - since < MISSED_NS || now - since < since - began || pool.active == 1) return;
  pool.wait_ns = now < pool.retry_at + pool.wait_ns ? 2 * pool.wait_ns : FIRST_WAIT_NS; /* soon after the last time */
  if (pool.wait_ns > LONGEST_WAIT_NS) pool.wait_ns = LONGEST_WAIT_NS;
  pool.retry_at = now + pool.wait_ns;
  atomic_fetch_sub(&pool.active, 1);
}

/* Do `count` pieces of work; `cost`: products of two numbers in all of it. */
static void in_parallel(Work work, const void *with, int64_t count, int64_t cost) {
  if (cost < WORTH_THREADS || pthread_mutex_trylock(&pool.one_at_a_time)) {
    work(with, 0, count);
    return;
  }
  if (!pool.threads) start_threads();
  if ((int)pool.active < pool.threads && now_ns() > pool.retry_at) {
    atomic_store(&pool.active, pool.threads);
    wake_all(&pool.active);
  }
  if (pool.active == 1) {
    work(with, 0, count);
  } else {
    const unsigned long long turn = (unsigned long long)(pool.turn + 1) << 32;
    atomic_store(&pool.claim, turn | UINT32_MAX); /* nothing to take while the rest changes */
    atomic_store(&pool.work, work);
    atomic_store(&pool.with, with);
    atomic_store(&pool.done, 0);
    atomic_store(&pool.count, count);
    atomic_store(&pool.claim, turn);
    atomic_fetch_add(&pool.turn, 1);
    if (atomic_load(&pool.sleeping)) wake_all(&pool.turn);
    const int64_t began = now_ns();
    do_share(NULL);
    wait_for_others(began);
  }
  pthread_mutex_unlock(&pool.one_at_a_time);
}

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

/* GCC would load it again for each use. */
#if defined(__AVX512F__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v)
#endif

typedef float half __attribute__((vector_size(2 * LANES)));
typedef float quarter __attribute__((vector_size(LANES)));

static inline float sum(vec v) { /* in halves: one entry after the other takes as long as a product of 128 columns */
  half a, b;
  memcpy(&a, &v, sizeof a);
  memcpy(&b, (const char *)&v + sizeof a, sizeof b);
  a += b;
  quarter c, d;
  memcpy(&c, &a, sizeof c);
  memcpy(&d, (const char *)&a + sizeof c, sizeof d);
  c += d;
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
    vec in[ROWS];                                                                                                      \
    for (int r = 0; r < ROWS; ++r) {                                                                                   \
      in[r] = LOAD(w + r * k + (C));                                                                                   \
      IN_REGISTER(in[r]);                                                                                              \
    }                                                                                                                  \
    for (int i = 0; i < M; ++i) {                                                                                      \
      vec xi = load(x + (C) * M + i * LANES);                                                                          \
      IN_REGISTER(xi);                                                                                                 \
      for (int r = 0; r < ROWS; ++r) acc[i][r] += xi * in[r];                                                          \
    }                                                                                                                  \
  }
#define BLOCK(NAME, TYPE, LOAD, M)                                                                                     \
  static void NAME##_##M(const float *x, const TYPE *w, vec (*sums)[ROWS], int64_t k, int64_t slice,                  \
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
  const int64_t blocks = (m + ROWS - 1) / ROWS, first = i / ROWS * ROWS / blocks, last = (i / ROWS + 1) * ROWS / blocks;
  if (is_float && m == 1) return (Ahead){w, 0, 0};
  if (is_float && (blocks <= 2 || blocks > 4)) return (Ahead){next + first * row, last - first, 0};
  if (i + ROWS >= m) return (Ahead){w + ROWS * row, ROWS, 0};
  return (Ahead){w + 2 * ROWS * row, 0, is_float};
}

/* y[i, j] = sum over c of x[i, c] * w[j, c] (* scale[j]) (+ bias[j]). K: a multiple of LANES, N of ROWS. Columns are worked
 * through in slices, so that those of x stay in the fastest cache from one row of w to the next. */
#define PRODUCT(NAME, TYPE, LOAD)                                                                                      \
  BLOCK(NAME, TYPE, LOAD, 1)                                                                                           \
  BLOCK(NAME, TYPE, LOAD, 2)                                                                                           \
  BLOCK(NAME, TYPE, LOAD, 3)                                                                                           \
  BLOCK(NAME, TYPE, LOAD, 4)                                                                                           \
  /* columns ROWS * from to ROWS * to of y */                                                                          \
  static void NAME##_columns(const void *with, int64_t from, int64_t to) {                                             \
    const Product p = *(const Product *)with;                                                                          \
    const int64_t k = p.k, n = p.n, most = p.m > ROWS ? SLICE : k, row = k * sizeof(TYPE);                             \
    vec sums[PANEL][ROWS];                                                                                             \
    for (int64_t j = ROWS * from; j < ROWS * to; j += ROWS) {                                                          \
      memset(sums, 0, p.m * sizeof *sums);                                                                             \
      for (int64_t c = 0; c < k; c += most) {                                                                          \
        const TYPE *w = (const TYPE *)p.w + j * k + c;                                                                 \
        const int64_t slice = k - c < most ? k - c : most;                                                             \
        const void *next = c + slice < k ? w + slice : (const TYPE *)p.w + (j + ROWS) * k;                             \
        const float *x = p.x + c * p.m;                                                                                \
        for (int64_t i = 0; i < p.m; i += ROWS, x += ROWS * slice) {                                                   \
          const Ahead ahead = to_ask(i, p.m, (const void *)w, next, row, sizeof(TYPE) == sizeof(float));               \
          switch (p.m - i) {                                                                                           \
            case 1: NAME##_1(x, w, sums + i, k, slice, ahead); break;                                                  \
            case 2: NAME##_2(x, w, sums + i, k, slice, ahead); break;                                                  \
            case 3: NAME##_3(x, w, sums + i, k, slice, ahead); break;                                                  \
            default: NAME##_4(x, w, sums + i, k, slice, ahead);                                                        \
          }                                                                                                            \
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

/* Rows of x (M, K) in slices of columns, a slice in groups of ROWS, of which LANES columns each lie together: rows at a
 * distance of a power of 2 would push each other out of the cache. */
static void side_by_side(float *packed, const float *x, int64_t m, int64_t k) {
  const int64_t most = m > ROWS ? SLICE : k;
  for (int64_t from = 0; from < k; from += most) {
    const int64_t to = k - from < most ? k : from + most;
    for (int64_t i = 0; i < m; i += ROWS)
      for (int64_t c = from; c < to; c += LANES)
        for (int64_t r = i; r < m && r < i + ROWS; ++r, packed += LANES)
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

/* int4: 2 * LANES columns of a row in LANES bytes, the first half of them in the low bits. An entry is (q - zero) * scale of its
 * group, rounded once, as the operators have it: where the processor can choose from 16 floats, a group's are computed once. */
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
  vec v;
#if defined(__AVX2__)
  __m128i q = _mm_loadu_si128((const __m128i *)from);
  q = _mm_and_si128(half ? _mm_srli_epi16(q, 4) : q, _mm_set1_epi8(15));
  for (int i = 0; i < LANES; i += 8, q = _mm_unpackhi_epi64(q, q)) {
    const __m256 part = _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(q)), _mm256_set1_ps(of.zero));
    const __m256 scaled = _mm256_mul_ps(part, _mm256_set1_ps(of.scale));
    memcpy((float *)&v + i, &scaled, sizeof scaled);
  }
#else
  for (int i = 0; i < LANES; ++i) v[i] = ((half ? from[i] >> 4 : from[i] & 15) - of.zero) * of.scale;
#endif
  return v;
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
      for (; c < end; c += 2 * LANES)                                                                                  \
        for (int half = 0; half < 2; ++half) {                                                                         \
          vec in[ROWS];                                                                                                \
          for (int r = 0; r < ROWS; ++r) {                                                                             \
            in[r] = load4(w + r * row + c / 2, of[r], half);                                                           \
            IN_REGISTER(in[r]);                                                                                        \
          }                                                                                                            \
          for (int i = 0; i < M; ++i) {                                                                                \
            vec xi = load(x + (c + half * LANES) * M + i * LANES);                                                     \
            IN_REGISTER(xi);                                                                                           \
            for (int r = 0; r < ROWS; ++r) acc[i][r] += xi * in[r];                                                    \
          }                                                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    memcpy(sums, acc, sizeof acc);                                                                                     \
  }
BLOCK4(1)
BLOCK4(2)
BLOCK4(3)
BLOCK4(4)

static void product4_columns(const void *with, int64_t from, int64_t to) {
  const Product p = *(const Product *)with;
  const int64_t k = p.k, most = p.m > ROWS ? SLICE : k;
  vec sums[PANEL][ROWS];
  for (int64_t j = ROWS * from; j < ROWS * to; j += ROWS) {
    memset(sums, 0, p.m * sizeof *sums);
    for (int64_t c = 0; c < k; c += most) {
      const int64_t slice = k - c < most ? k - c : most;
      const float *x = p.x + c * p.m;
      for (int64_t i = 0; i < p.m; i += ROWS, x += ROWS * slice) {
        switch (p.m - i) {
          case 1: product4_1(x, &p, j, c, slice, sums + i); break;
          case 2: product4_2(x, &p, j, c, slice, sums + i); break;
          case 3: product4_3(x, &p, j, c, slice, sums + i); break;
          default: product4_4(x, &p, j, c, slice, sums + i);
        }
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

/* parts * LANES columns of values (S, D), weighted, times `factor` -> y. Several at once: each sum waits for its last addition. */
#define MIX(NAME, TYPE, LOAD)                                                                                          \
  static inline void NAME(const float *weights, const TYPE *values, int64_t s, int64_t d, float factor, float *y,      \
                          int parts) {                                                                                 \
    vec acc[ROWS] = {{0}};                                                                                             \
    for (int64_t i = 0; i < s; ++i, values += d)                                                                       \
      for (int r = 0; r < parts; ++r) acc[r] += weights[i] * LOAD(values + r * LANES);                                 \
    for (int r = 0; r < parts; ++r) *(vec *)(y + r * LANES) = acc[r] * factor;                                         \
  }                                                                                                                    \
  static inline float NAME##_score(const float *q, const TYPE *key, int64_t d) {                                       \
    vec acc = {0};                                                                                                     \
    for (int64_t c = 0; c < d; c += LANES) acc += load(q + c) * LOAD(key + c);                                         \
    return sum(acc);                                                                                                   \
  }                                                                                                                    \
  static void NAME##_all(const float *weights, const TYPE *values, int64_t s, int64_t d, float factor, float *y) {     \
    for (int64_t c = 0; c < d; c += ROWS * LANES) {                                                                    \
      if (d - c < ROWS * LANES)                                                                                        \
        for (; c < d; c += LANES) NAME(weights, values + c, s, d, factor, y + c, 1);                                   \
      else                                                                                                             \
        NAME(weights, values + c, s, d, factor, y + c, ROWS);                                                          \
    }                                                                                                                  \
  }
MIX(mix, float, load)
MIX(mix8, int8_t, load8)

/* x (D) as int8 -> y; returns its scale. As sporeloom/nn/cache.py. */
static float quantize(const float *x, int8_t *y, int64_t d) {
  float top = 1e-30f;
  for (int64_t c = 0; c < d; ++c) top = fabsf(x[c]) > top ? fabsf(x[c]) : top;
  const float scale = top / 127.0f;
  for (int64_t c = 0; c < d; ++c) y[c] = (int8_t)rintf(x[c] / scale);
  return scale;
}

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
    for (int64_t s = 0; s < last; ++s) {
      const float score = of_k ? mix8_score(q, k8 + s * d, d) * of_k[s] : mix_score(q, k + s * d, d);
      probs[s] = score * scale + hidden[s];
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

/* What a layer is made of, as sporeloom/inference/kernels.py writes it; each an int32. */
enum {
  NORM_RMS, NORM_BIAS, KIND, ACTIVATION, GATED, WEIGHTS, QKV_BIAS, OUTPUT_BIAS, MLP_BIAS, ROTATED, ADJACENT, HEADS, FEATURES, EPSILON, CACHE_INT8
};
enum { SEQUENTIAL, PARALLEL, SANDWICH };
enum { GELU, GELU_TANH, FAST_GELU, SILU };
enum { IN_FLOAT, IN_INT8, IN_INT4, IN_INT4_ZEROS };

/* The next inputs of a layer. */
typedef struct {
  void **p;
  int64_t **shapes;
  const int32_t *plan;
  int at, failed;
} Inputs;

/* x (M, K) times the next matrix -> y (M, N) */
static void next_product(Inputs *in, const float *x, float *y, int64_t m, int has_bias) {
  const int kind = in->plan[WEIGHTS];
  const int64_t *of = in->shapes[in->at], n = of[0], k = kind >= IN_INT4 ? of[1] * 2 * LANES : of[1];
  const void *w = in->p[in->at++];
  const int64_t groups = kind >= IN_INT4 ? in->shapes[in->at][1] : 1;
  const float *scale = kind ? in->p[in->at++] : NULL;
  const uint8_t *zero = kind == IN_INT4_ZEROS ? in->p[in->at++] : NULL;
  const float *bias = has_bias ? in->p[in->at++] : NULL;
  in->failed |= kind >= IN_INT4   ? product4(x, w, scale, zero, bias, y, m, k, n, groups)
                : kind == IN_INT8 ? product8(x, w, scale, bias, y, m, k, n)
                                  : product(x, w, scale, bias, y, m, k, n);
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
