# SPDX-License-Identifier: Apache-2.0
"""Gathers full tensors from the shards of all ranks, through files on a shared file system."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from sporeloom.core.files import write_atomically
from sporeloom.core.reader import read_json
from sporeloom.parallel.report import Report
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.program import storage
from sporeloom.strategy.tensor_slice import TensorSlice

WAIT_S = 1800.0


def gather_whole(
    cell: nn.Cell, engine: Engine, report: Report, folder: Path, wanted: Callable[[str], bool]
) -> dict[str, NDArray[Any]] | None:
    """Full value of every `wanted` parameter or optimizer state, on rank 0; None on the other ranks.

    `folder`, on a file system that all ranks share, is used for the shards and removed.

    Raises:
        TimeoutError: a rank did not write its shards.
        RuntimeError: the shards do not cover a tensor.
    """
    parts, places = {}, {}
    engine.backend.bring_up_to_date()
    for parameter in cell.get_parameters():
        if not wanted(parameter.name):
            continue
        part = engine.slice_to_write(parameter.name, report.of(parameter.name))
        if part is not None:
            parts[parameter.name] = storage(parameter).asnumpy().copy()  # the graph continues to write its own buffer
            places[parameter.name] = [part.start, part.shape]
    if engine.strategy.mesh.size == 1:
        return parts
    if engine.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed run, it would be read as shards of this one
    engine.barrier()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"rank_{engine.rank}.json", lambda path: _write_json(path, places))
    write_atomically(folder / f"rank_{engine.rank}.safetensors", lambda path: save_file(parts, path))
    if engine.rank != 0:
        return None
    whole = _join(folder, engine.strategy.mesh.size, report)
    shutil.rmtree(folder)
    return whole


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _join(folder: Path, num_ranks: int, report: Report) -> dict[str, NDArray[Any]]:
    whole: dict[str, NDArray[Any]] = {}
    covered: dict[str, int] = {}
    for rank in range(num_ranks):
        path = folder / f"rank_{rank}.safetensors"
        deadline = time.monotonic() + WAIT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {rank} did not write its part of the checkpoint to {folder} within {WAIT_S} s"
                )
            time.sleep(0.05)
        places = read_json(folder / f"rank_{rank}.json").mapping
        for name, value in load_file(path).items():
            target = whole.setdefault(name, np.empty(report.of(name).global_shape, value.dtype))
            target[TensorSlice(*map(tuple, places[name])).slices] = value
            covered[name] = covered.get(name, 0) + value.size
    for name, value in whole.items():
        if covered[name] != value.size:
            raise RuntimeError(f"{name}: the ranks wrote {covered[name]} of its {value.size} entries")
    return whole
