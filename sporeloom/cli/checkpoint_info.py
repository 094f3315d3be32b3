# SPDX-License-Identifier: Apache-2.0
"""Show what a training checkpoint contains, verify it, and compare it with another.

    sporeloom checkpoint-info out/latest/checkpoints --verify
    sporeloom checkpoint-info out/latest/checkpoint --verify
    sporeloom checkpoint-info out/latest/checkpoint --accept-changes
    sporeloom checkpoint-info out/latest/checkpoints/step-00000020 --diff other/checkpoints/step-00000020

A folder of checkpoints stands for the newest. --verify and --accept-changes are for every folder with hashes.json: model
folders, adapters and token files, too. With --diff the exit code is 1 if a tensor differs.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sporeloom.checkpoint.compare import Difference, compare
from sporeloom.checkpoint.contents import AVERAGES, BESIDE_WEIGHTS, WEIGHTS_ALONE, check_contents, model_of
from sporeloom.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from sporeloom.checkpoint.published_folder import is_published_folder, open_published
from sporeloom.checkpoint.reshard import find_checkpoint
from sporeloom.checkpoint.sharded import damage
from sporeloom.checkpoint.tensor_hashes import seal, tensor_damage
from sporeloom.core.command_line import argument, option, parse_args
from sporeloom.core.errors import ConfigError, without_control
from sporeloom.core.hashes import HASHES, TENSORS, check_hashes, command, read_hashes, without_hash
from sporeloom.core.log import counted, print_report
from sporeloom.core.shipped import shipped_names
from sporeloom.data.token_file import TOKENS
from sporeloom.models.parameters import num_parameters
from sporeloom.strategy.axes import ROWS
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.loader import load_strategy

LONGEST = 600
"""Maximum number of characters shown of a part of the state."""


@dataclass(frozen=True, kw_only=True)
class InfoConfig:
    checkpoint: Path = argument("checkpoint, or folder of checkpoints")
    diff: Path | None = option(None, "another checkpoint: list the tensors that differ and by how much (default: none)")
    tensors: bool = option(False, "list every tensor: shape, shards, hash")
    verify: bool = option(False, "read all files and recompute every hash")
    accept_changes: bool = option(
        False,
        "write the hashes of all files anew, after some were edited on purpose; tensors of a checkpoint must "
        "be unchanged",
    )


def describe(folder: Path, manifest: Manifest, with_tensors: bool) -> list[str]:
    weights = [e for name, e in manifest.tensors.items() if not name.startswith(BESIDE_WEIGHTS)]
    num_averages = sum(name.startswith(AVERAGES) for name in manifest.tensors)
    counts = f"{len(weights)} weights and {len(manifest.tensors) - len(weights) - num_averages} moments"
    counts += f", and {num_averages} averages of weights," if num_averages else ""
    model = {k: v for k, v in manifest.model.items() if k != "family"}
    degrees = " x ".join(
        f"{axis.name} {degree}"
        for axis in ROWS
        if (degree := manifest.strategy.get(axis.name, 1)) != 1 or axis.is_shown
    )
    files = counted(len(manifest.files), "file", "files")
    used = "can be started from" if manifest.state.get(WEIGHTS_ALONE) else "resumes"
    lines = [
        f"{folder}: step {manifest.step}, {manifest.num_bytes / 1e6:,.1f} MB in {files}",
        f"  {counts} of {manifest.model['family']}: {model}",
        f"  written under {degrees} {manifest.strategy.get('file', '')}".rstrip(),
        *(f"  {part}: {_shortened(str(values))}" for part, values in manifest.state.items() if values),
        f"  versions: {manifest.versions}",
        f"  {used} on one device and under any strategy that fits the model; of the built-in ones: "
        + ", ".join(fitting(manifest, folder)),
    ]
    if with_tensors:
        width = max(map(len, manifest.tensors))
        lines += [
            f"  {name:{width}}  {entry.dtype} {list(entry.shape)}  {len(entry.parts)} parts  {entry.hash}"
            for name, entry in manifest.tensors.items()
        ]
    return lines


def describe_published(folder: Path) -> str:
    """Describe a Hugging Face folder, whose tensors are compared with its configuration."""
    source = open_published(folder)
    size = sum(path.stat().st_size for path in {tensor.path for tensor in source.tensors.values()}) / 1e6
    command = shlex.join(["sporeloom", "convert-checkpoint", "--from", "huggingface", str(folder), "OUT"])
    return (
        f"{folder}: Hugging Face folder ({source.way.model_type}), {num_parameters(source.model):,} parameters of "
        f"{source.family}, {size:,.1f} MB\n"
        f"  read as it is by --checkpoint and --from-checkpoint; {command} writes a copy with hashes, which --verify checks"
    )


def fitting(manifest: Manifest, folder: Path) -> list[str]:
    """Built-in strategies that the checkpoint's model can be sharded by."""
    _, model = model_of(manifest, folder)
    return [name for name in shipped_names() if not model_problems(load_strategy(name), model)]


def show(difference: Difference) -> str:
    if difference.problem:
        return f"  {difference.name}: {difference.problem}"
    return f"  {difference.name}: {difference.count:,} entries differ, by {difference.largest:.3g} at most"


def main(argv: Sequence[str]) -> int:
    config = parse_args(InfoConfig, __doc__, argv)
    if config.accept_changes:
        return accept_changes(config.checkpoint)
    if not (config.checkpoint / MANIFEST).exists() and (config.checkpoint / HASHES).exists():
        return verify_folder(config.checkpoint, config.verify)
    if not (config.checkpoint / MANIFEST).exists() and any(config.checkpoint.glob(f"*{TENSORS}")):
        if is_published_folder(config.checkpoint) and not (config.diff or config.tensors or config.verify):
            print_report(describe_published(config.checkpoint))
            return 0
        raise ConfigError(
            f"{config.checkpoint}: there is no {HASHES}, as in folders that others publish, so nothing says whether the "
            f"files are as they were written; if you trust them as they are: {command(config.checkpoint)}"
        )
    folder = find_checkpoint(config.checkpoint)
    manifest = read_manifest(folder)
    check_contents(manifest, folder)
    if config.diff:
        other = find_checkpoint(config.diff)
        differences = compare(folder, manifest, other, read_manifest(other))
        print_report(
            "\n".join([f"{len(differences)} of {len(manifest.tensors)} tensors differ", *map(show, differences)])
        )
        return 1 if differences else 0
    print_report("\n".join(describe(folder, manifest, config.tensors)))
    if config.verify:
        if problem := damage(folder, manifest):
            raise ConfigError(problem)
        print(f"  all {len(manifest.tensors)} tensors and {_counted(folder)} are as they were written")
        _list_added(folder)
    return 0


def verify_folder(folder: Path, everything: bool) -> int:
    """List the files of a model folder, of adapters, or of token files. `everything`: read them all."""
    files = check_hashes(folder, unread=() if everything else (TOKENS,)) or {}
    print(f"{folder}: {sum(entry['bytes'] for entry in files.values()) / 1e6:,.1f} MB in {_counted(folder)}")
    print("".join(f"  {name}: {entry['bytes']:,} bytes\n" for name, entry in files.items()), end="")
    if everything:
        if problem := tensor_damage(folder):
            raise ConfigError(problem)
        print(f"  all {_counted(folder)} are as they were written")
        _list_added(folder)
    return 0


def _list_added(folder: Path) -> None:
    for name in without_hash(folder):
        print(without_control(f"  {name}: has no hash; it was put here later"))


def accept_changes(folder: Path) -> int:
    """Write the hashes of a folder's files as they are now.

    Raises:
        ConfigError: what they say cannot be.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder, is_trusted=True)
        check_contents(manifest, folder)
        if problem := damage(folder, manifest):
            raise ConfigError(problem)
    seal(folder)
    print(f"{folder / HASHES}: {_counted(folder)} as they are now")
    return 0


def _counted(folder: Path) -> str:
    return counted(len(read_hashes(folder) or {}), "file", "files")


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text):,} characters)"
