# SPDX-License-Identifier: Apache-2.0
"""How fast a published folder becomes ours, and how much memory that takes.

    python benchmarks/convert.py

Makes a folder of random bfloat16 weights, openPangu-Embedded 7B with fewer layers, and converts it in a process of
its own, which reports its largest memory.
"""

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mindloom.checkpoint.tensor_files import Described, write_model_files
from mindloom.models.family import family_module, size_config

LAYERS = 6
CONVERT = """
import resource, sys
from mindloom.verbs.convert_checkpoint import main
main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def make_folder(folder: Path) -> int:
    config = dataclasses.replace(size_config("pangu", "embedded_7b"), num_layers=LAYERS)
    way = family_module("pangu", "weights").PUBLISHED[1]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(way.write(config)))
    described = {name: Described("bfloat16", shape) for name, shape in way.shapes(config).items()}
    noise = np.random.default_rng(0).integers(0, 1 << 15, 1 << 20, np.uint16)

    def arrays(names):
        return (np.resize(noise, described[name].shape) for name in names)

    return write_model_files(folder, described, arrays, 2_000_000_000)


def main() -> None:
    scratch = Path(tempfile.mkdtemp())
    try:
        size = make_folder(scratch / "published")
        print(f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}; {size / 1e9:.2f} GB of bfloat16")
        for dtype in ("bfloat16", "float32"):
            begin = time.perf_counter()
            arguments = ["--from", "huggingface", str(scratch / "published"), str(scratch / dtype), "--dtype", dtype]
            done = subprocess.run(
                [sys.executable, "-c", CONVERT, *arguments], capture_output=True, text=True, check=True
            )
            seconds = time.perf_counter() - begin
            peak = int(done.stdout.split()[-1])
            print(f"to {dtype}: {size / 1e6 / seconds:.0f} MB/s of what is read, {peak / 1e9:.2f} GB of memory at most")
            shutil.rmtree(scratch / dtype)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
