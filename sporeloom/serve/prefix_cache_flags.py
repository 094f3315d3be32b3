# SPDX-License-Identifier: Apache-2.0
"""Checks of the flags of the prefix cache, before weights are loaded."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from sporeloom.core.files import unwritable
from sporeloom.inference.cache import cache_bytes
from sporeloom.inference.prefix_cache import block_tokens
from sporeloom.models.config import ModelConfig
from sporeloom.strategy.config import Strategy

if TYPE_CHECKING:
    from sporeloom.serve.config import ServeConfig

GB = 2**30
DEFAULT_DIR_GB = 10.0
MIN_BLOCKS = 2
"""Blocks that the folder must have room for."""
OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def prefix_cache_problems(
    config: ServeConfig, model: ModelConfig | None, strategy: Strategy | None, chunk: int
) -> list[str]:
    """List what is wrong with the flags of the prefix cache. `chunk`: tokens of a block without compiled kernels, unless the
    flag --prefill-chunk says otherwise."""
    folder, size = config.prefix_cache_dir, config.prefix_cache_dir_gb
    problems = _size_problems(config, model, strategy, chunk)
    if folder is None:
        return problems + (
            [f"--prefix-cache-dir-gb {size} is for files; add --prefix-cache-dir FOLDER"] if size else []
        )
    found = []
    if not config.prefix_cache_gb:
        found.append("blocks are stored from memory; leave out --prefix-cache-gb 0")
    if model and model.has_convolutions:
        found.append("models with causal convolutions have no prefix cache; leave it out")
    if strategy and strategy.mesh.size > 1:
        found.append(f"for one device, but the strategy has {strategy.mesh.size}; leave out one of them")
    if folder.is_file():
        found.append("it is a file; give a folder")
    elif reason := (unwritable(folder) or "").removeprefix(f"{folder}: "):
        found.append(f"{reason}; give a folder")
    elif folder.exists():
        found += _access_problems(folder)
    return problems + [f"--prefix-cache-dir {folder}: {problem}" for problem in found]


def _access_problems(folder: Path) -> list[str]:
    """Keys and values reveal prompts, and whoever can write to the folder can replace them."""
    about = folder.stat()
    if about.st_uid != os.geteuid():
        return [f"user {about.st_uid} owns it, not the one who serves; give a folder of your own"]
    if about.st_mode & OF_OTHERS:
        mode = stat.S_IMODE(about.st_mode)
        return [
            f"other users have access to it (mode {mode:o}), and prompts can be read there; chmod 700 it, or give another"
        ]
    return []


def _size_problems(config: ServeConfig, model: ModelConfig | None, strategy: Strategy | None, chunk: int) -> list[str]:
    """Sizes without room for a block, of as few tokens as it can have with these flags."""
    if model is None or model.has_convolutions:
        return []
    num_replicas, num_devices = (strategy.mesh.dp, strategy.mesh.size) if strategy else (1, 1)
    in_float32 = model.compute_dtype == "float32"
    has_adapters = bool(config.lora_modules or config.runtime_lora_folder)
    has_kernels = num_devices == 1 and in_float32 and not (model.experts or model.latent or has_adapters)
    block = block_tokens(1 if has_kernels else min(config.prefill_chunk or chunk, model.seq_len))
    held = model if config.has_mtp else model.without_mtp()
    num_bytes = block * cache_bytes(held, 1, 1, config.kv_cache, config.num_drafts)
    problems, of_memory = [], num_bytes * num_replicas
    if 0 < config.prefix_cache_gb * GB < of_memory:
        problems.append(
            f"--prefix-cache-gb {config.prefix_cache_gb:g}: no room for a block of {block} tokens, which takes "
            f"{_gb(of_memory)}; give more, or 0"
        )
    if (size := config.prefix_cache_dir_gb) and config.prefix_cache_dir and size * GB < MIN_BLOCKS * num_bytes:
        problems.append(
            f"--prefix-cache-dir-gb {size:g}: no room for {MIN_BLOCKS} blocks of {block} tokens, which take "
            f"{_gb(MIN_BLOCKS * num_bytes)}; give more"
        )
    return problems


def _gb(num_bytes: int) -> str:
    """A size as a flag would give it, rounded up."""
    return f"{math.ceil(num_bytes / GB * 1e6) / 1e6:g} GB"
