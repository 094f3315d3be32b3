# SPDX-License-Identifier: Apache-2.0
"""Several adapters of one matrix, for inference: every token uses its own, or none."""

from collections.abc import Mapping, Sequence

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer


class AdaptedProduct(nn.Cell):
    """Base of every kind of `Linear`: it can hold adapters of its matrix W (out, in).

    y = x W^T + (x A^T where m, else 0) B^T. A (R, in) and B (out, R) hold those of all adapters, one after another, B with
    their scales in it; a token's m (R,) is 1 where its adapter stands, and 0 elsewhere. What a token gets depends on its own
    row alone, and on its own adapter alone even where another one's x A^T is infinite; B is finite.
    """

    has_adapters = False
    has_kernel = False
    """Whether few rows go through a compiled kernel (`sporeloom.inference.kernels`)."""

    def attach_adapters(self, widths: Sequence[int]) -> None:
        """Allocate one adapter of each of these widths (r); 0 for adapters that do not change this matrix."""
        outer, inner = self.matrix_shape
        total = sum(widths)
        self.has_adapters = True
        self.lora_a = Parameter(initializer("zeros", (total, inner), mstype.float32), requires_grad=False)
        self.lora_b = Parameter(initializer("zeros", (outer, total), mstype.float32), requires_grad=False)
        self.lora_mask = Parameter(initializer("zeros", (1 + len(widths), total), mstype.float32), requires_grad=False)
        self.lora_down, self.lora_up = ops.MatMul(transpose_b=True), ops.MatMul(transpose_b=True)
        self.lora_ids, self.lora_pick = ops.Reshape(), ops.Gather()
        self.lora_others, self.lora_choose = ops.Equal(), ops.MaskedFill()
        self.lora_add, self.lora_cast = ops.Add(), ops.Cast()

    def with_adapters(self, y, x, adapter_ids):
        """y (N, out) of x (N, in), plus the adapters of the N tokens; adapter_ids: (B, T), 0 for none."""
        mask = self.lora_pick(self.lora_mask, self.lora_ids(adapter_ids, (-1,)), 0)  # (N, R)
        narrow = self.lora_down(x, self.lora_cast(self.lora_a, self.dtype))
        narrow = self.lora_choose(narrow, self.lora_others(mask, 0.0), 0.0)
        return self.lora_add(y, self.lora_up(narrow, self.lora_cast(self.lora_b, self.dtype)))


def attach_several_adapters(net: nn.Cell, widths: Mapping[str, Sequence[int]]) -> None:
    """Allocate adapters of the matrices of these paths."""
    for path, cell in net.cells_and_names():
        if path in widths:
            cell.attach_adapters(widths[path])
            for name in ("lora_a", "lora_b", "lora_mask"):
                getattr(cell, name).name = f"{path}.{name}"
