# SPDX-License-Identifier: Apache-2.0
"""MindFormers itself, imported once and without its warnings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.environment import prepare_environment


@contextmanager
def _quietly() -> Iterator[None]:
    """Importing mindformers warns of parts that are for Ascend, and changes how Python shows warnings."""
    show = warnings.showwarning
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        warnings.showwarning = show


prepare_environment()
with _quietly():
    try:
        mindformers: Any = import_module("mindformers")
        tokenization: Any = import_module("mindformers.models.tokenization_utils")
        logger: logging.Logger = import_module("mindformers.tools.logger").get_logger()
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install -e '.[mindformers]'") from None
