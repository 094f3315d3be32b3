// SPDX-License-Identifier: Apache-2.0
// Takes the place of two functions of MindSpore that let idle threads of its pools poll for work, for up to 0.1 s, before
// they sleep. Loaded before MindSpore, so that its calls find these. Without these names in MindSpore this has no effect.

void _ZN9mindspore10ThreadPool20SetSpinCountMaxValueEv(void *pool) { (void)pool; }

void _ZN9mindspore10ThreadPool27SetKernelThreadMaxSpinCountEi(void *pool, int count) { (void)pool, (void)count; }
