# SPDX-License-Identifier: Apache-2.0
"""Adapters that a server is given as folders, at its start or while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sporeloom.checkpoint.adapters import Adapter, read_adapter
from sporeloom.checkpoint.generation_config import with_end_tokens
from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import Tokenizer, folder_tokenizer
from sporeloom.models.adapters import ADAPTER_CONFIG, base_folder, is_adapter_folder, is_reward_adapter
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module


class OtherBaseError(ConfigError):
    """Adapters of another model. The message has paths of this machine."""


def read_module(
    source: str,
    folder: Path,
    checkpoint: Path,
    family: str,
    model: ModelConfig,
    base_tokenizer: Callable[[], Tokenizer],
) -> tuple[Tokenizer, tuple[int, ...], Adapter]:
    """Read tokenizer, stop ids and adapters of a folder.

    Args:
        source: what names the folder, for messages.
        checkpoint: the folder of the served model.
        base_tokenizer: the served model's, for a folder without its own.

    Raises:
        ConfigError: no such folder, or adapters of another model.
    """
    if not is_adapter_folder(folder):
        raise ConfigError(f"{source}: {folder / ADAPTER_CONFIG} is not there; a folder of adapters has it")
    base = _base(folder)
    if base and not base.samefile(checkpoint):
        raise OtherBaseError(
            f"{source}: adapters of {base}, but this server runs {checkpoint}; if both are "
            f"the same, name the latter in {folder / ADAPTER_CONFIG}, base_model_name_or_path"
        )
    if is_reward_adapter(folder):
        raise ConfigError(f"{source}: adapters of a reward model, which generates no text")
    adapter = read_adapter(folder, family, model)
    own = any((folder / file).is_file() for file in family_module(family, "tokenizer").FILE_NAMES)
    tokenizer = folder_tokenizer(family, folder, model) if own else base_tokenizer()
    return tokenizer, with_end_tokens(model, folder).end_ids, adapter


def _base(folder: Path) -> Path | None:
    """Find the model folder that adapters belong to, if it is here."""
    try:
        return base_folder(folder)
    except ConfigError:
        return None
