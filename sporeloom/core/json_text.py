# SPDX-License-Identifier: Apache-2.0
"""The one writer of JSON for other programs: NaN and infinity, which JSON cannot express, become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, **options: Any) -> str:
    """Format a value as JSON; a non-finite number as null. `options`: those of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # the rare case pays
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_finite(key) if isinstance(key, float) else key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
