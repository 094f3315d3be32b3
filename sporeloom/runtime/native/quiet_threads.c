// SPDX-License-Identifier: Apache-2.0
// Takes the place of functions of MindSpore's thread pools in processes that share cores. Loaded before MindSpore, so that its
// calls find these. Without these names in MindSpore this has no effect.

// Two functions that let idle threads poll for work, for up to 0.1 s, before they sleep.
void _ZN9mindspore10ThreadPool20SetSpinCountMaxValueEv(void *pool) { (void)pool; }

void _ZN9mindspore10ThreadPool27SetKernelThreadMaxSpinCountEi(void *pool, int count) { (void)pool, (void)count; }

#ifdef ONE_THREAD // for ranks that have no second core
// A std::function of libstdc++: int (void *content, int task, float, float).
typedef struct {
  char storage[16];
  void *manager;
  int (*call)(const void *storage, void **content, int *task, float *from, float *to);
} Function;

// Runs the tasks of a kernel one after another. MindSpore hands some of them to a second thread and yields the core in a loop
// until they are done, which takes turns with every process of the machine. The tasks, and so all bits, are the same. `from`
// and `to` are what MindSpore's pools give tasks of one thread.
int _ZN9mindspore10ThreadPool14ParallelLaunchERKSt8functionIFiPviffEES2_i(void *pool, const Function *of, void *content,
                                                                          int count) {
  (void)pool;
  for (int task = 0; task < count; ++task) {
    int number = task;
    float from = 0, to = 1;
    const int failed = of->call(of->storage, &content, &number, &from, &to);
    if (failed) return failed;
  }
  return 0;
}
#endif
