# SPDX-License-Identifier: Apache-2.0
"""The one reader of lines: a line ends at \\n or \\r\\n, and at nothing else.

`str.splitlines` and its kin end one at form feeds, U+0085, U+2028 and more as well, which are characters like others.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from typing import Any, AnyStr, cast

from sporeloom.core.files import read_bytes


def split_lines(text: AnyStr) -> list[AnyStr]:
    """Lines of a text without their ends; the last one may lack it."""
    newline, carriage_return = (b"\n", b"\r") if isinstance(text, bytes) else ("\n", "\r")
    *lines, rest = cast(Any, text).split(newline)
    return [line.removesuffix(carriage_return) for line in lines] + ([rest] if rest else [])


def file_lines(path: Path) -> list[str]:
    """Lines of a UTF-8 file, which Python's text files would end at a single \\r, too."""
    return split_lines(read_bytes(path).decode("utf-8-sig"))


async def stream_lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Lines of a stream of UTF-8 bytes, as they come."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()


def first_line(said: object) -> str:
    """The first line of a message; of an exception that says nothing, its kind."""
    text = str(said).strip()
    return split_lines(text)[0] if text else type(said).__name__
