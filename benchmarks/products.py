# SPDX-License-Identifier: Apache-2.0
"""Products of the compiled kernels beside MindSpore's own, in graphs on one CPU process with one thread each.

    python benchmarks/products.py

The kernels sum each entry in one order, so that what a row gets does not depend on the others (docs/how-to/serve.md). Sizes
are those of models of 350M to 1.5B parameters: matrices for the tokens of a step, and attention of 8 sequences. Times
are the least of all turns, of which each has both implementations: other programs then disturb neither much.
Writes benchmarks/results/products.md.
"""

import os
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of the kernels, read when they are loaded

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from report import write_report

from sporeloom.inference.kernels import kernel_library, use_products

RESULTS = Path(__file__).parent / "results" / "products.md"
TURNS, LEAST_S = 9, 0.004
ROWS = (1, 4, 8, 16, 64)
MATRICES = {"350M, width": (1024, 1024), "350M, up": (1024, 4096), "350M, down": (4096, 1024), "1.5B, up": (1536, 8960)}
"""Name -> (K, N) of a layer's matrix, whose rows are the N outputs."""
HEADS, WIDTH, SLOTS = 8 * 16, 64, 512


class Product(nn.Cell):
    def __init__(self, kind: str, transposed: bool):
        super().__init__()
        self.product = getattr(ops, kind)(transpose_b=transposed)

    def construct(self, x, w):
        return self.product(x, w)


def cases():
    """(name, rows, kind of operator, whether the second matrix lies transposed, shapes)."""
    for name, (k, n) in MATRICES.items():
        for rows in ROWS:
            yield f"{name} {k} x {n}", rows, "MatMul", True, ((rows, k), (n, k))
    for rows in (1, 16):
        yield f"scores, {SLOTS} slots", rows, "BatchMatMul", True, ((HEADS, rows, WIDTH), (HEADS, SLOTS, WIDTH))
        yield f"values, {SLOTS} slots", rows, "BatchMatMul", False, ((HEADS, rows, SLOTS), (HEADS, SLOTS, WIDTH))


def pair(kind, transposed, shapes, library, draw):
    """Functions that compute a product by MindSpore's operator and by the kernels; they agree."""
    inputs = [Tensor(draw.standard_normal(shape, np.float32)) for shape in shapes]
    own, ours = Product(kind, transposed), Product(kind, transposed)
    assert use_products(ours, library) == 1
    expected, found = (net(*inputs).asnumpy() for net in (own, ours))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    return [lambda net=net: net(*inputs) for net in (own, ours)]


def seconds(function, calls):
    start = time.perf_counter()
    for _ in range(calls):
        function()
    ms.runtime.synchronize()
    return (time.perf_counter() - start) / calls


def compare(functions):
    """Least seconds of each."""
    calls = [max(1, round(LEAST_S / max(seconds(function, 2), 1e-6))) for function in functions]
    turns = [[seconds(*each) for each in zip(functions, calls, strict=True)] for _ in range(TURNS)]
    return [min(taken) for taken in zip(*turns, strict=True)]


def main():
    ms.set_context(mode=ms.GRAPH_MODE, runtime_num_threads=1)
    ms.set_device("CPU")
    library = kernel_library()
    if library is None:
        sys.exit("error: the kernels cannot be built here")
    draw, ratios = np.random.default_rng(0), []
    lines = [
        f"MindSpore {ms.__version__}, float32, one thread; the least of {TURNS} turns; load of the machine "
        f"before the run {os.getloadavg()[0]:.1f}.",
        "",
        "| product | rows | MindSpore, ms | kernels, ms | ratio | GFLOP/s of the kernels |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows, kind, transposed, shapes in cases():
        own, ours = compare(pair(kind, transposed, shapes, library, draw))
        ratios.append(ours / own)
        flops = 2 * np.prod(shapes[0]) * shapes[1][-2 if transposed else -1]
        lines.append(
            f"| {name} | {rows} | {own * 1e3:.3f} | {ours * 1e3:.3f} | {ratios[-1]:.2f} | {flops / ours / 1e9:.0f} |"
        )
        print(lines[-1], flush=True)
    lines += ["", f"Median ratio {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}."]
    print("\n".join(lines))
    write_report(RESULTS, "Products of the kernels beside MindSpore's", "products.py", lines)


if __name__ == "__main__":
    main()
