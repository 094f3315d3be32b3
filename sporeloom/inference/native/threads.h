/* SPDX-License-Identifier: Apache-2.0
 *
 * Threads of our own. Those of OpenMP sleep after each product when MindSpore has threads, too, and a layer has many: to wake
 * them took longer than the products of int8.
 *
 * A call is over when its pieces are done, not when every thread has come: one that the system gives no core costs nothing
 * unless it holds a piece. When it does, the caller waits for as long as somebody else computes, some 3 ms where a product
 * takes 0.1. So threads offer their core to others between two pieces; and when one is missed all the same, the caller goes on
 * with a thread less for a while, which sleeps, so that the others keep their cores. */
#define WORTH_THREADS (1 << 17) /* products of two numbers; less is done before a second thread has begun */
#define MOST_THREADS 64
#define LEAST_PIECES 4 /* of work that a thread takes at once */
#define LINE 64 /* bytes of the cache */
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
