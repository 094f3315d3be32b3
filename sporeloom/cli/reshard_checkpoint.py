# SPDX-License-Identifier: Apache-2.0
"""Reshard the files of a training checkpoint for the ranks of another strategy, without a device.

    sporeloom reshard-checkpoint out/latest/checkpoints resharded --strategy pangu_13b_dp128_tp8
    sporeloom reshard-checkpoint out/latest/checkpoints/step-00000020 whole --full --verify

IN is a checkpoint, or a folder of them: then the newest. Every checkpoint can be resumed on every mesh as it is; files
sharded for a mesh only spare its ranks reading other ranks' parts. Memory: the largest part of a tensor, twice, and 0.4 GB
for MindSpore with --strategy.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sporeloom.checkpoint.contents import check_contents, model_of
from sporeloom.checkpoint.destinations import destinations
from sporeloom.checkpoint.manifest import read_manifest
from sporeloom.checkpoint.published_folder import refuse_published
from sporeloom.checkpoint.reshard import find_checkpoint, reshard
from sporeloom.checkpoint.sharded import damage
from sporeloom.core.command_line import Overwrite, argument, option, output_argument, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import counted
from sporeloom.core.outputs import replacing
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy


@dataclass(frozen=True, kw_only=True)
class ReshardConfig(Overwrite):
    input: Path = argument("checkpoint to read")
    output: Path = output_argument("folder to write")
    strategy: Path | None = option(None, "strategy file, or name of a built-in strategy (default: none, see --full)")
    full: bool = option(False, "write one file with all tensors unsharded, as for one device")
    verify: bool = option(False, "read the result again and recompute every hash")


def main(argv: Sequence[str]) -> int:
    config = parse_args(ReshardConfig, __doc__, argv)
    if bool(config.strategy) == config.full:
        raise ConfigError("give either --strategy FILE or --full")
    refuse_published(config.input, config.output, *(["--strategy", str(config.strategy)] if config.strategy else []))
    source = find_checkpoint(config.input)
    manifest = read_manifest(source)
    check_contents(manifest, source)
    strategy = load_strategy(config.strategy) if config.strategy else SINGLE_DEVICE
    described = {**asdict(strategy.mesh), "file": str(config.strategy or "")}
    shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
    prepare_environment()
    shards = destinations(strategy, *model_of(manifest, source), shapes)
    with replacing(config):
        manifest = reshard(source, config.output, shards, described)
        if config.verify and (problem := damage(config.output, manifest)):
            raise ConfigError(problem)
    checked = f"; {len(manifest.tensors)} hashes verified" if config.verify else ""
    files = counted(len(manifest.files), "file", "files")
    print(f"{config.output}: {files}, {manifest.num_bytes / 1e6:,.1f} MB for {strategy.mesh}{checked}")
    return 0
