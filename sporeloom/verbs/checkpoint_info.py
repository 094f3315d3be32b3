# SPDX-License-Identifier: Apache-2.0
"""What a training checkpoint holds, whether it is sound, and how two of them differ.

    sporeloom checkpoint-info out/latest/checkpoints --verify
    sporeloom checkpoint-info out/latest/checkpoints/step-00000020 --diff other/checkpoints/step-00000020

A folder of checkpoints stands for the newest. With --diff the exit code is 1 if a tensor differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sporeloom.checkpoint.compare import Difference, compare
from sporeloom.checkpoint.contents import MOMENTS, WEIGHTS_ALONE, check_contents, model_of
from sporeloom.checkpoint.manifest import Manifest, read_manifest
from sporeloom.checkpoint.reshard import find_checkpoint
from sporeloom.checkpoint.sharded import damage
from sporeloom.cli import argument, option, parse_args
from sporeloom.errors import ConfigError
from sporeloom.log import counted
from sporeloom.shipped import shipped_names
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.loader import load_strategy

LONGEST = 600
"""Characters of a part of the state that are shown."""


@dataclass(frozen=True, kw_only=True)
class InfoConfig:
    checkpoint: Path = argument("checkpoint, or folder of checkpoints")
    diff: Path | None = option(None, "another checkpoint: list the tensors that differ and by how much")
    tensors: bool = option(False, "list every tensor: shape, parts, hash")
    verify: bool = option(False, "read everything and recompute every hash")


def describe(folder: Path, manifest: Manifest, with_tensors: bool) -> list[str]:
    weights = [e for name, e in manifest.tensors.items() if not name.startswith(MOMENTS)]
    model = {k: v for k, v in manifest.model.items() if k != "family"}
    degrees = " x ".join(f"{axis} {manifest.strategy.get(axis, 1)}" for axis in ("pp", "dp", "tp"))
    files = counted(len(manifest.files), "file", "files")
    used = "can be started from" if manifest.state.get(WEIGHTS_ALONE) else "resumes"
    lines = [
        f"{folder}: step {manifest.step}, {manifest.num_bytes / 1e6:,.1f} MB in {files}",
        f"  {len(weights)} weights and {len(manifest.tensors) - len(weights)} moments of {manifest.model['family']}: {model}",
        f"  written under {degrees} {manifest.strategy.get('file', '')}".rstrip(),
        *(f"  {part}: {_shortened(str(values))}" for part, values in manifest.state.items() if values),
        f"  versions: {manifest.versions}",
        f"  {used} on one device and under any strategy that fits the model; of the shipped ones: "
        + ", ".join(fitting(manifest, folder)),
    ]
    if with_tensors:
        width = max(map(len, manifest.tensors))
        lines += [
            f"  {name:{width}}  {entry.dtype} {list(entry.shape)}  {len(entry.parts)} parts  {entry.hash}"
            for name, entry in manifest.tensors.items()
        ]
    return lines


def fitting(manifest: Manifest, folder: Path) -> list[str]:
    """Shipped strategies that the checkpoint's model can be sharded by."""
    _, model = model_of(manifest, folder)
    return [name for name in shipped_names() if not model_problems(load_strategy(name), model)]


def show(difference: Difference) -> str:
    if difference.problem:
        return f"  {difference.name}: {difference.problem}"
    return f"  {difference.name}: {difference.count:,} entries differ, by {difference.largest:.3g} at most"


def main(argv: Sequence[str]) -> int:
    config = parse_args(InfoConfig, __doc__, argv)
    folder = find_checkpoint(config.checkpoint)
    manifest = read_manifest(folder)
    check_contents(manifest, folder)
    if config.diff:
        other = find_checkpoint(config.diff)
        differences = compare(folder, manifest, other, read_manifest(other))
        print(f"{len(differences)} of {len(manifest.tensors)} tensors differ")
        print("\n".join(map(show, differences)), end="\n" if differences else "")
        return 1 if differences else 0
    print("\n".join(describe(folder, manifest, config.tensors)))
    if config.verify:
        if problem := damage(folder, manifest):
            raise ConfigError(problem)
        print(f"  all {len(manifest.tensors)} tensors are what was written")
    return 0


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text):,} characters)"
