# SPDX-License-Identifier: Apache-2.0
"""Single tokens as clients see them: names, offsets in a text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sporeloom.data.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone: its text; where that is an incomplete character, its bytes; where it has none, its name."""
    found = tokenizer.token_bytes(token)
    try:
        return found.decode() or tokenizer.token_name(token) or token_by_id(token)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def token_by_id(token: int) -> str:
    """A token by its id alone."""
    return f"token_id:{token}"


def token_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Character offsets of the tokens of a text; one that begins within a character has that character's.

    Where encoding changed the text (folded or dropped characters), as close as its tokens show.
    """
    parts = [tokenizer.token_bytes(token) for token in tokens]
    joined = b"".join(parts)
    if joined.startswith(b" ") and (joined[1:] == text.encode() or not text.startswith(" ")):
        first = next(place for place, part in enumerate(parts) if part)
        parts[first] = parts[first][1:]  # the space that SentencePiece puts in front
    characters, position, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for token, part in zip(tokens, parts, strict=True):
        offsets.append(min(position, len(text)))
        name = tokenizer.token_name(token)
        if not part and name and text.startswith(name, position):  # a special token that was written out
            position += len(name)
        position += len(characters.decode(part))
    return offsets
