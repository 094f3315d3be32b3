# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer is to the rest of the project."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int:
        """Closes every document."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...
