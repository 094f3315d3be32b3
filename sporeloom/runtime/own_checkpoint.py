# SPDX-License-Identifier: Apache-2.0
"""Unsharded checkpoints of a user's parallel network, in one file of MindSpore's format."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_atomically
from sporeloom.runtime.auto_parallel import parallel_of
from sporeloom.runtime.gather import gather_whole

FORMATS = ("ckpt", "safetensors")


def save_checkpoint(network: nn.Cell, path: str | Path) -> None:
    """Write the unsharded parameters of a parallel network into one file.

    `ms.save_checkpoint` would write this rank's shards here. To continue on one device or under any mesh, call
    `ms.load_checkpoint(path, net)` before `auto_parallel(net, ...)`. Every process calls this function; the first one writes,
    and all return when the file is complete.

    Args:
        network: a network that `auto_parallel` returned, called at least once.
        path: a name that ends with .ckpt or .safetensors, on a file system that all processes share.

    Raises:
        ConfigError: another suffix or network, or a network on devices, where MindSpore's own function joins the shards.
    """
    path, parallel = Path(path), parallel_of(network, "save_checkpoint")
    if path.suffix[1:] not in FORMATS:
        raise ConfigError(f"save_checkpoint: {path} has to end with {' or '.join(f'.{name}' for name in FORMATS)}")
    engine, report, held = parallel.engine, parallel.report, list(parallel.network.get_parameters())
    several = engine.strategy.mesh.size > 1
    if several and not engine.backend.layouts:
        raise ConfigError(
            "save_checkpoint: the network has not run yet, so nothing was trained; call it after the first step"
        )
    names = {parameter.name for parameter in held} & report.by_name.keys()
    whole = gather_whole(parallel.network, engine, report, path.with_name(f".{path.name}.parts"), names.__contains__)
    if whole is not None:
        # Parameters that no graph uses are unsharded on every rank.
        entries = [
            {"name": p.name, "data": Tensor(whole[p.name] if p.name in whole else p.asnumpy(), dtype=p.dtype)}
            for p in held
        ]
        kind = path.suffix[1:]
        write_atomically(path, lambda partial: _write(entries, partial, kind))
    engine.barrier()  # no rank returns before the file exists


def _write(entries: list[dict[str, object]], path: Path, kind: str) -> None:
    named = path.with_name(f"{path.name}.{kind}")  # MindSpore adds the suffix where it is missing
    try:
        ms.save_checkpoint(entries, str(named), format=kind)
        named.replace(path)
    finally:
        named.unlink(missing_ok=True)
