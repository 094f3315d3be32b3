# SPDX-License-Identifier: Apache-2.0
"""How fast a published folder becomes ours, and how much memory that takes.

    python benchmarks/convert.py

Makes a folder of random bfloat16 weights, openPangu-Embedded 7B with fewer layers, and converts it in a process of
its own, which reports its largest memory.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from report import ROOT, write_report

from sporeloom.checkpoint.tensor_files import TensorDescription, numpy_dtype, write_model_files
from sporeloom.models.family import family_module, size_config

LAYERS = 6
CONVERT = """
import resource, sys
from sporeloom.cli.convert_checkpoint import main
main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def make_folder(folder: Path) -> int:
    config = dataclasses.replace(size_config("pangu", "embedded_7b"), num_layers=LAYERS)
    way = family_module("pangu", "weights").PUBLISHED[1]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(way.write(config)))
    described = {name: TensorDescription("bfloat16", shape) for name, shape in way.shapes(config).items()}
    noise = np.random.default_rng(0).integers(0, 1 << 15, 1 << 20, np.uint16).view(numpy_dtype("bfloat16"))

    def arrays(names):
        return (np.resize(noise, described[name].shape) for name in names)

    return write_model_files(folder, described, arrays, 2_000_000_000)


def main() -> None:
    scratch = Path(tempfile.mkdtemp())
    ways = {
        "bfloat16": ["--dtype", "bfloat16"],
        "float32": ["--dtype", "float32"],
        "float32, 8 ranks' files (tp 8)": ["--strategy", "pangu_embedded_7b_tp8"],
    }
    rows = ["| to | MB/s of what is read | memory at most |", "|---|---|---|"]
    try:
        size = make_folder(scratch / "published")
        for what, flags in ways.items():
            begin = time.perf_counter()
            arguments = ["--from", "huggingface", str(scratch / "published"), str(scratch / "ours"), *flags]
            done = subprocess.run(
                [sys.executable, "-c", CONVERT, *arguments], capture_output=True, text=True, check=True
            )
            seconds = time.perf_counter() - begin
            peak = int(done.stdout.split()[-1])
            rows.append(f"| {what} | {size / 1e6 / seconds:.0f} | {peak / 1e9:.2f} GB |")
            print(rows[-1], flush=True)
            shutil.rmtree(scratch / "ours")
    finally:
        shutil.rmtree(scratch)
    about = (
        f"{size / 1e9:.2f} GB of bfloat16 in files of 2 GB, shapes of openPangu-Embedded 7B with {LAYERS} layers; "
        f"the largest tensor has 1.26 GB. NumPy {np.__version__}. Asked for: 200 MB/s, less than 2 GB."
    )
    write_report(
        ROOT / "benchmarks" / "results" / "convert.md",
        "A published folder becomes ours",
        "convert.py",
        [about, "", *rows],
    )


if __name__ == "__main__":
    main()
