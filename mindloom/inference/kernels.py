# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels for decoding on one CPU: kernels.c, built once for each machine and compiler, and put into a network."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from mindspore import nn, ops

from mindloom.files import cache_folder, write_atomically
from mindloom.log import milestone
from mindloom.nn.attention import Attention
from mindloom.nn.head import TiedHead
from mindloom.nn.int8 import Int8Head, Int8Linear, Int8TiedHead
from mindloom.nn.linear import Linear

SWITCH = "MINDLOOM_KERNELS"
"""Environment: 0 computes with MindSpore's operators alone."""
SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
BUILD_S = 120.0
LANES, COLUMNS = 16, 4
"""What the length of rows and the number of columns must be multiples of."""


def kernel_library() -> Path | None:
    """The library of kernels.c, built if it is not there yet; None where it is switched off or cannot be built, with a line
    that says why."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if os.environ.get(SWITCH) == "0" or platform.system() != "Linux":
        return None
    if compiler is None:
        milestone("no C compiler (cc): decoding with MindSpore's operators, which is slower")
        return None
    path = cache_folder() / "kernels" / f"{_fingerprint(compiler)}.so"
    try:
        if not path.is_file():
            write_atomically(path, lambda partial: _build(compiler, partial))
        ctypes.CDLL(str(path))  # what it needs is there: MindSpore would end in a traceback of C++
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        milestone(f"kernels.c cannot be used, decoding is slower: {str(said).strip().splitlines()[0]}")
        return None
    return path


def _build(compiler: str, path: Path) -> None:
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(path), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S)


def _fingerprint(compiler: str) -> str:
    """Of all that the library depends on; a home folder may be shared by different machines."""
    found = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace") if Path("/proc/cpuinfo").exists() else ""
    )
    cpu = next((line for line in found.splitlines() if line.startswith(("flags", "Features"))), platform.machine())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return hashlib.sha256("\0".join([SOURCE.read_text(), *FLAGS, version, cpu]).encode()).hexdigest()[:32]


def use_kernels(net: nn.Cell, library: Path) -> int:
    """Let the parts of an inference network compute few rows, and single queries over a cache, by the library. Returns how
    many parts do; those whose type or sizes it has no kernel for stay as they are."""
    count = 0
    for _, cell in net.cells_and_names():
        kernel = _kernel_for(cell)
        if kernel:
            name, shape = kernel
            cell.kernel = ops.Custom(f"{library}:{name}", out_shape=shape, out_dtype=lambda x, *_: x, func_type="aot")
            cell.has_kernel = True
            count += 1
    return count


def _kernel_for(cell: nn.Cell) -> tuple[str, Callable[..., list[int]]] | None:
    """Name of a part's kernel, and the shape of what it gives."""
    if str(getattr(cell, "dtype", "")) != "Float32":
        return None
    if isinstance(cell, Attention):
        return ("attend", lambda q, *_: q) if cell.head_dim % LANES == 0 else None
    if not isinstance(cell, Linear | Int8Linear | TiedHead):
        return None
    is_int8 = isinstance(cell, Int8Linear | Int8Head | Int8TiedHead)
    rows, columns = (
        (cell.config.vocab_size, cell.config.hidden_size) if isinstance(cell, TiedHead) else cell.weight.shape
    )
    if columns % LANES or rows % COLUMNS:
        return None
    return "linear_int8" if is_int8 else "linear", lambda x, w, *_: [x[0], w[0]]
