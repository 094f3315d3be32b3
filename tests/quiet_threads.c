// SPDX-License-Identifier: Apache-2.0
// Preloaded into the processes of the farm: idle threads of MindSpore sleep at once. It lets them poll for up to 0.1 s, which
// costs a third of all time where eight ranks share two cores. Without these names in MindSpore this has no effect.

void _ZN9mindspore10ThreadPool20SetSpinCountMaxValueEv(void *pool) { (void)pool; }

void _ZN9mindspore10ThreadPool27SetKernelThreadMaxSpinCountEi(void *pool, int count) { (void)pool, (void)count; }
