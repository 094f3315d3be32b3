# SPDX-License-Identifier: Apache-2.0
"""Cut the files of a training checkpoint as another strategy's ranks hold them, without a device.

    mindloom reshard-checkpoint out/checkpoints resharded --strategy pangu_13b_dp128_tp8
    mindloom reshard-checkpoint out/checkpoints/step-00000020 whole --full --verify

IN is a checkpoint, or a folder of them: then the newest. Every checkpoint can be resumed on every mesh as it is; files cut
for a mesh only spare its ranks reading other ranks' parts. Memory: the largest part of a tensor, twice.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mindloom.checkpoint.contents import FACTORED, MOMENTS, check_contents, model_of
from mindloom.checkpoint.manifest import read_manifest
from mindloom.checkpoint.reshard import Cut, find_checkpoint, reshard
from mindloom.checkpoint.sharded import damage, file_name
from mindloom.cli import argument, option, parse_args
from mindloom.errors import ConfigError
from mindloom.log import counted
from mindloom.models.config import ModelConfig
from mindloom.processes import end_with_parent
from mindloom.runtime.environment import prepare_environment
from mindloom.strategy.checks import model_problems
from mindloom.strategy.config import SINGLE_DEVICE, Strategy
from mindloom.strategy.loader import load_strategy


@dataclass(frozen=True, kw_only=True)
class ReshardConfig:
    input: Path = argument("checkpoint to read")
    output: Path = argument("folder to write")
    strategy: Path | None = option(None, "strategy file, or the name of a shipped one")
    full: bool = option(False, "one file with everything whole, as one device holds it")
    verify: bool = option(False, "read the result again and recompute every hash")


def cuts_for(strategy: Strategy, source: Path) -> dict[str, list[Cut]]:
    """The parts of every tensor of a checkpoint under a strategy."""
    manifest = read_manifest(source)
    if strategy.mesh.size == 1:
        whole = {name: tuple(slice(0, length) for length in e.shape) for name, e in manifest.tensors.items()}
        return {name: [(file_name(0), slices)] for name, slices in whole.items()}
    family, model = model_of(manifest, source)
    if problems := model_problems(strategy, model):
        raise ConfigError(problems)
    # MindSpore takes 400 MB: a process of its own gives them back.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent, (os.getpid(),)) as pool:
        parts = pool.submit(_predicted_parts, family, model, strategy).result()
    found = {}
    for name, entry in manifest.tensors.items():
        prefix = next((moment for moment in MOMENTS if name.startswith(moment)), "")
        if prefix in FACTORED:  # whole on every rank
            found[name] = [(file_name(0), tuple(slice(0, length) for length in entry.shape))]
        else:
            found[name] = [(file_name(rank), slices) for rank, slices in parts[name.removeprefix(prefix)]]
    return found


def _predicted_parts(family: str, model: ModelConfig, strategy: Strategy) -> Any:
    prepare_environment()
    return import_module("mindloom.train.predicted_parts").predicted_parts(family, model, strategy)


def main(argv: Sequence[str]) -> int:
    config = parse_args(ReshardConfig, __doc__, argv)
    if bool(config.strategy) == config.full:
        raise ConfigError("give either --strategy FILE or --full")
    source = find_checkpoint(config.input)
    check_contents(read_manifest(source), source)
    strategy = load_strategy(config.strategy) if config.strategy else SINGLE_DEVICE
    described = {**asdict(strategy.mesh), "file": str(config.strategy or "")}
    manifest = reshard(source, config.output, cuts_for(strategy, source), described)
    if config.verify and (problem := damage(config.output, manifest)):
        raise ConfigError(problem)
    checked = f"; {len(manifest.tensors)} hashes verified" if config.verify else ""
    files = counted(len(manifest.files), "file", "files")
    print(f"{config.output}: {files}, {manifest.num_bytes / 1e6:,.1f} MB for {strategy.mesh}{checked}")
    return 0
