# SPDX-License-Identifier: Apache-2.0
"""Files of arrays (.npz) that are computed once and stored. Each array has a checksum, which is verified on
reading."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import check_regular


def read_arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """Read the arrays of a file, by name.

    Raises:
        ConfigError: it is missing, damaged, or holds others.
    """
    try:
        check_regular(path)
        with np.load(path, allow_pickle=False) as archive:
            return [archive[name] for name in names]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: damaged, or not such a file: {why}; remove it and make it again") from None
