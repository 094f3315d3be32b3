# SPDX-License-Identifier: Apache-2.0
"""Settings of published runs with experts that their tables leave out, from the recipes that the tables name."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sporeloom.core.reader import read_yaml

RECIPES = Path(__file__).with_name("recipes.yaml")
WHOLE_LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a run."""

    library: bool = True
    """Rows of experts go through a library (`Parallelism.sends_once`)."""
    overlap: bool = False
    """All-to-alls run while another microbatch is computed."""
    captured: Literal["none", "attention", "all"] = "none"
    repeats: tuple[str, ...] = ("layernorm", "moe_act")
    """Modules that the backward pass recomputes, by Megatron's names; `layer`: everything."""
    fills_parts: bool = False
    """All virtual stages have as many layers as the first but the last one, which has the rest, multi-token prediction and
    the head; else as even as possible."""
    cudnn: bool = True
    """Attention is cuDNN's; else as fast as in the runs of dense models. No benchmark of kernels has GPT-OSS's sinks."""
    mtp: int = 0
    """Depths of multi-token prediction."""
    ep: int = 0
    """0: as the table says."""
    state: tuple[int, int, int] = (2, 2, 12)
    """Bytes of a parameter: weights, gradients, and what the optimizer keeps besides, master weights among it."""
    head_norms: bool = False
    """Queries and keys have norms."""
    stash: float = 1.0
    """Memory that is set aside for rows of experts, relative to balanced experts."""
    reshards: bool = False
    """Weights that FSDP gathered are given up after each pass; else kept for the step."""
    capacity: float = 1.0
    """Rows that experts compute, relative to those they get."""
    flash: bool = True
    shards_sequences: bool = True
    """Tensor parallel ranks share sequences."""

    @property
    def state_bytes(self) -> dict[str, Any]:
        """`state` as fields of `Parallelism`."""
        return dict(zip(("weight_bytes", "gradient_bytes", "optimizer_bytes"), self.state, strict=True))

    def layers_of_stages(self, num_layers: int, pp: int, virtual_stages: int) -> tuple[int, ...] | None:
        """Layers of each stage; None: as even as possible."""
        if not self.fills_parts:
            return None
        parts = pp * virtual_stages
        of_part = math.ceil(num_layers / parts)
        return (*(of_part * virtual_stages,) * (pp - 1), num_layers - of_part * (parts - virtual_stages))


@functools.cache
def recipes() -> dict[str, Recipe]:
    """Settings by the id of a row."""
    document, found = read_yaml(RECIPES), {}
    for name, values in document.mapping.items():
        fields: dict[str, Any] = {key: tuple(of) if isinstance(of, list) else of for key, of in values.items()}
        found[name] = Recipe(**fields)
    return found
