# SPDX-License-Identifier: Apache-2.0
"""Answers in JSON that can always be written, whatever a client or a model said."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from sporeloom.core.json_text import json_text


class JsonResponse(JSONResponse):
    """JSON in ASCII: half characters (lone surrogates) are escaped, as UTF-8 has none, and non-finite numbers are null."""

    def render(self, content: Any) -> bytes:
        if not isinstance(content, dict):
            return _text(content).encode("ascii")
        # Entry by entry: one call for thousands of vectors would stop all threads for seconds.
        parts = (
            f"{_text(key)}:[{','.join(map(_text, value))}]"
            if isinstance(value, list)
            else f"{_text(key)}:{_text(value)}"
            for key, value in content.items()
        )
        return f"{{{','.join(parts)}}}".encode("ascii")


def _text(value: Any) -> str:
    return json_text(value, separators=(",", ":"))
