# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels for decoding on one CPU: kernels.c, built once for each machine and compiler, and inserted into
a network."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from sporeloom.core.compiled import c_compiler, kept_or_built, why_unusable
from sporeloom.core.log import milestone
from sporeloom.nn.attention import Attention
from sporeloom.nn.blocks import Block, DecoderLayer, ParallelBlock, SandwichLayer
from sporeloom.nn.cache import Int8KVCache
from sporeloom.nn.head import TiedHead
from sporeloom.nn.int4 import Int4ExpertLinear, Int4Linear
from sporeloom.nn.int8 import Int8ExpertLinear, Int8Head, Int8Linear, Int8TiedHead
from sporeloom.nn.latent_attention import LatentAttention
from sporeloom.nn.linear import Linear
from sporeloom.nn.lora import LoRALinear
from sporeloom.nn.mlp import ErfGelu, FastGelu, GatedMLP, SiLU, TanhGelu
from sporeloom.nn.moe import ExpertLinear, MoE
from sporeloom.nn.multi_lora import AdaptedProduct
from sporeloom.nn.norm import RMSNorm
from sporeloom.nn.w8a8 import W8A8ExpertLinear, W8A8Linear
from sporeloom.runtime.cpu.products import NAMES

SWITCH = "SPORELOOM_KERNELS"
"""Environment variable: 0 computes with MindSpore's operators alone."""
SOURCE = Path(__file__).parent / "native" / "kernels.c"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-shared", "-fPIC")
LIBRARIES = ("-lm",)
BLOCK_KINDS = (DecoderLayer, ParallelBlock, SandwichLayer)
ACTIVATION_KINDS = (ErfGelu, TanhGelu, FastGelu, SiLU)
"""Kinds of activation functions, in the order of kernels.c."""
MAX_HEAD_DIM = 1024
PLAN_LENGTH = 15
"""Numbers of a plan, in the order of kernels.c."""
LANES, COLUMNS = 16, 4
"""The length of rows and the number of columns must be multiples of these."""


def kernel_library() -> Path | None:
    """The library of kernels.c, built if it is not there yet; None where it is switched off or cannot be built, with a line
    that says why."""
    compiler = c_compiler()
    if os.environ.get(SWITCH) == "0" or platform.system() != "Linux":
        return None
    if compiler is None:
        milestone("no C compiler (cc): decoding with MindSpore's operators, which is slower")
        return None
    try:
        path = kept_or_built(compiler, SOURCE, FLAGS, LIBRARIES)
        # What it needs is there: MindSpore would end in a traceback of C++.
        ctypes.CDLL(str(path)).use_threads(num_threads())
    except (OSError, subprocess.SubprocessError) as error:
        milestone(f"{SOURCE.name} cannot be used, decoding is slower: {why_unusable(error)}")
        return None
    return path


def num_threads() -> int:
    """Number of threads: the user's choice, or one for each core that this process may use. MindSpore sets
    OMP_NUM_THREADS to 1, for C alone."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of nested regions the outermost
    return int(wanted) if wanted.isdecimal() else len(os.sched_getaffinity(0))


def use_kernels(net: nn.Cell, library: Path) -> int:
    """Let the layers of an inference network, and the parts that layers it does not know are made of, compute few tokens by
    the library. Returns how many do; those whose type or sizes it has no kernel for stay as they are."""
    count = 0
    for _, cell in net.cells_and_names():
        kernel = _kernel_for(cell)
        if kernel:
            name, shape = kernel
            cell.kernel = ops.Custom(f"{library}:{name}", out_shape=shape, out_dtype=lambda x, *_: x, func_type="aot")
            cell.has_kernel = True
            count += 1
    return count


def use_products(net: nn.Cell, library: Path) -> int:
    """Let the library compute all products of an inference network in float32 that are MindSpore's own. Returns their
    number."""
    count = 0
    for _, cell in net.cells_and_names():
        for name, own in list(cell._primitives.items()):
            if type(own) in (ops.MatMul, ops.BatchMatMul):
                lies = own.transpose_a, own.transpose_b
                shape = partial(_shape_of_product, *lies)
                function = f"{library}:{NAMES[lies]}"
                product = ops.Custom(function, out_shape=shape, out_dtype=lambda x, _: x, func_type="aot")
                setattr(cell, name, product)
                count += 1
    return count


def _shape_of_product(x_lies: bool, w_lies: bool, x: list[int], w: list[int]) -> list[int]:
    return [*np.broadcast_shapes(x[:-2], w[:-2]), x[-1 if x_lies else -2], w[-2 if w_lies else -1]]


def rows_are_alone(net: nn.Cell) -> bool:
    """Whether what a row gets is the same to the bit however many rows there are: its products are all by the library, which
    sums each entry in one order. MindSpore's own choose an order by the number of rows."""
    products = [
        c
        for _, c in net.cells_and_names()
        if isinstance(c, Attention | LatentAttention | AdaptedProduct | LoRALinear | TiedHead)
    ]
    return not net.has_several_adapters and all(cell.has_kernel for cell in products)


def _kernel_for(cell: nn.Cell) -> tuple[str, Callable[..., list[int]]] | None:
    """Name of a part's kernel, and the shape of its output."""
    if isinstance(cell, Block):
        plan = _plan(cell)
        if plan is None:
            return None
        cell.plan = Tensor(plan)
        return "layer", lambda x, *_: x
    if isinstance(cell, MoE):
        plan = _experts_plan(cell)
        if plan is None:
            return None
        cell.plan = Tensor(plan)
        return "experts", lambda x, chosen, *_: [*chosen, x[1]]
    if not isinstance(cell, Attention | Linear | Int8Linear | Int4Linear | TiedHead) or str(cell.dtype) != "Float32":
        return None
    if isinstance(cell, Attention):
        name = "attend_int8" if isinstance(cell.cache, Int8KVCache) else "attend"
        return (name, lambda q, *_: q) if cell.head_dim % LANES == 0 else None
    rows, columns = (
        (cell.config.vocab_size, cell.config.hidden_size) if isinstance(cell, TiedHead) else cell.matrix_shape
    )
    if columns % LANES or rows % COLUMNS:
        return None
    return f"linear{_WEIGHTS[_weights_of(cell)]}", lambda x, w, *_: [x[0], w[0]]


_WEIGHTS = ("", "_int8", "_w8a8", "_int4", "_int4_zeros")
"""Kinds of weights, in the order of kernels.c."""


def _weights_of(cell: nn.Cell) -> int:
    """The kind of a part's matrix."""
    if isinstance(cell, Int4Linear | Int4ExpertLinear):
        return 4 if cell.has_zeros else 3
    if isinstance(cell, W8A8Linear | W8A8ExpertLinear):
        return 2
    return int(isinstance(cell, Int8Linear | Int8ExpertLinear | Int8Head | Int8TiedHead))


def _plan(layer: Block) -> NDArray[np.int32] | None:
    """Description of a layer for kernels.c; None: it cannot compute such a layer."""
    if type(layer) not in BLOCK_KINDS or layer.has_experts or not isinstance(layer.attention, Attention):
        return None
    attention, mlp, norm = layer.attention, layer.mlp, layer.attention_norm
    matrices = [attention.query, attention.key, attention.value, attention.output, mlp.up, mlp.down]
    matrices += [mlp.gate] if isinstance(mlp, GatedMLP) else []
    is_plain = all(
        type(matrix) in (Linear, Int8Linear, W8A8Linear, Int4Linear) and not matrix.has_adapters for matrix in matrices
    )
    if not is_plain or len({_weights_of(matrix) for matrix in matrices}) > 1:
        return None
    widths = [length for matrix in matrices for length in matrix.matrix_shape]
    head = attention.head_dim
    if str(attention.dtype) != "Float32" or head > MAX_HEAD_DIM or any(n % LANES for n in (head, *widths)):
        return None
    rotary = attention.query_rotary if attention.has_rotary else None
    is_rms = isinstance(norm, RMSNorm)
    epsilon = norm.epsilon if is_rms else norm.layer_norm.epsilon
    plan = [
        int(is_rms),
        int(not is_rms and norm.has_bias),
        BLOCK_KINDS.index(type(layer)),
        ACTIVATION_KINDS.index(type(mlp.activation)),
        int(isinstance(mlp, GatedMLP)),
        _weights_of(mlp.up),
        int(attention.query.has_bias),
        int(attention.output.has_bias),
        int(mlp.up.has_bias),
        rotary.rotated if rotary else 0,
        int(bool(rotary and rotary.adjacent)),
        attention.num_heads,
        mlp.up.matrix_shape[0],
        int(np.float32(epsilon).view(np.int32)),
        int(isinstance(attention.cache, Int8KVCache)),
    ]
    return np.asarray(plan, np.int32)


EXPERT_KINDS = (ExpertLinear, Int8ExpertLinear, W8A8ExpertLinear, Int4ExpertLinear)


def _experts_plan(layer: MoE) -> NDArray[np.int32] | None:
    """Description of the experts of a layer for kernels.c, with 0 where it is of attention; None: it cannot compute them."""
    mlp = layer.experts
    matrices = [mlp.up, mlp.down, *([mlp.gate] if mlp.is_gated else [])]
    if any(type(matrix) not in EXPERT_KINDS for matrix in matrices) or len({_weights_of(m) for m in matrices}) > 1:
        return None
    widths = (layer.hidden_size, mlp.up.weight.shape[1])
    if str(layer.dtype) != "Float32" or any(n % LANES for n in widths):
        return None
    plan = np.zeros(PLAN_LENGTH, np.int32)
    plan[3:6] = ACTIVATION_KINDS.index(type(mlp.activation)), int(mlp.is_gated), _weights_of(mlp.up)
    plan[8] = int(mlp.up.has_bias)
    return plan
