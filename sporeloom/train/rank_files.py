# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own checkpoint files of every rank, for users who load them with MindSpore."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import flush_all, partial_name
from sporeloom.core.hashes import write_hashes
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.runtime.cpu.partition import partition
from sporeloom.strategy.config import Strategy
from sporeloom.train.saving import logical_name

LAYOUTS = "layouts"


def write_rank_files(
    folder: Path, weights: Mapping[str, NDArray[Any]], family: str, model: ModelConfig, strategy: Strategy
) -> None:
    """Write `rank_0/checkpoint_0.ckpt`, ... under the network's parameter names, and `layouts/` with what MindSpore's
    `transform_checkpoints` needs to know of them. Each rank is compiled; its parts are the compiler's.

    Raises:
        ConfigError: the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: exists; choose another name")
    strategy, partial = strategy.by_mindspore(), partial_name(folder)
    try:
        (partial / LAYOUTS).mkdir(parents=True)
        for rank in range(strategy.mesh.size):
            _write_rank(partial, rank, weights, family, model, strategy)
        write_hashes(partial)
        flush_all(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_rank(
    folder: Path,
    rank: int,
    weights: Mapping[str, NDArray[Any]],
    family: str,
    model: ModelConfig,
    strategy: Strategy,
) -> None:
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
    report = parallelize(net, strategy)
    shape = (strategy.mesh.dp * strategy.num_parts(), model.seq_len)
    inputs = [(shape, np.int32)] * 3 + [(shape, np.float32)]
    layouts_file = folder / LAYOUTS / f"strategy_{rank}.ckpt"
    graph = partition(wrap(net, strategy).set_train(False), strategy, rank, inputs, layouts_file)
    entries = []
    for parameter in report.parameters:
        if parameter.name in graph.parameters:
            slices = graph.layouts[parameter.name].slices(parameter.global_shape, rank, graph.groups)
            part = np.ascontiguousarray(weights[logical_name(parameter.name)][slices])
            entries.append({"name": parameter.name, "data": Tensor(part)})
    target = folder / f"rank_{rank}"
    target.mkdir()
    ms.save_checkpoint(entries, str(target / f"checkpoint_{rank}.ckpt"))
