# SPDX-License-Identifier: Apache-2.0
"""Saves one state after another in two threads that play two ranks, until it is killed: kill_worker.py ROOT

Begins after the newest complete checkpoint; prints each step once it is saved.
"""

import sys
import threading
from pathlib import Path

import numpy as np

from sporeloom.checkpoint.manifest import checkpoints, read_manifest
from sporeloom.checkpoint.sharded import LocalTensor, damage, finish, remove_leftovers, remove_old, write_parts
from sporeloom.core.errors import ConfigError

ABOUT = {"state": {}, "model": {}, "strategy": {}, "versions": {}}
SHAPE = (64, 2000)


def value_at(step):
    return np.random.RandomState(step).standard_normal(SHAPE).astype(np.float32)


def newest_step(root):
    for folder in checkpoints(root):
        try:
            manifest = read_manifest(folder)
        except ConfigError:
            continue
        if damage(folder, manifest) is None:
            return manifest.step
    return 0


def main(root):
    remove_leftovers(root)
    step = newest_step(root)
    print("started", flush=True)
    while True:
        step += 1
        partial, whole = root / f".step-{step:08d}.1.partial", value_at(step)
        halves = [{"a": LocalTensor(whole[rank * 32 : rank * 32 + 32], (rank * 32, 0), SHAPE)} for rank in range(2)]
        other = threading.Thread(target=write_parts, args=(partial, 1, halves[1]))
        other.start()
        write_parts(partial, 0, halves[0])
        finish(partial, root, 2, step, ABOUT)
        other.join()
        remove_old(root, 2)
        print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
