# SPDX-License-Identifier: Apache-2.0
"""Remote procedure calls between the tests of a problem and a solution, one file for each language.

The tests run in a process and a sandbox of their own; a call of the solution sends the arguments through a pipe as plain
data and waits for the result. So a solution has nothing of the tests within reach: all it can do is answer.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

FILES = {
    "python": "rpc.py",
    "cpp": "rpc.hpp",
    "java": "Rpc.java",
    "js": "rpc.js",
    "go": "rpc.go",
    "rust": "rpc.rs",
}


@cache
def source(language: str) -> str:
    """The source text that both programs, the tests and the solution, contain."""
    return Path(__file__).with_name(FILES[language]).read_text(encoding="utf-8")
