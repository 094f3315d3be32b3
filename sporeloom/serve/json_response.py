# SPDX-License-Identifier: Apache-2.0
"""Answers in JSON that can always be written, whatever a client or a model said."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from sporeloom.core.json_text import json_text


class JsonResponse(JSONResponse):
    """JSON in ASCII: half characters (lone surrogates) are escaped, as UTF-8 has none, and non-finite numbers are null."""

    def render(self, content: Any) -> bytes:
        return json_text(content, separators=(",", ":")).encode("ascii")
