# SPDX-License-Identifier: Apache-2.0
"""Contents of a SentencePiece model file: kinds of pieces and text normalization, to read and to change.

Read from the bytes: importing protobuf before MindSpore would choose an implementation that MindSpore's own messages refuse.
Source: sentencepiece_model.proto (field numbers, defaults); the Protocol Buffers encoding, in which a later value of a field
replaces an earlier one and a later message is merged into an earlier one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces. Names of user-defined pieces in a text become these pieces, names of control pieces never do."""
_PIECES, _NORMALIZER, _SELF_TEST = 1, 3, 4
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class PieceFile:
    """A model file, parsed from its bytes."""

    content: bytes
    kinds: tuple[tuple[str, int], ...]
    """Name and kind of each piece, by its id."""
    normalization: str
    """Name of the rule; identity leaves text as it is."""
    adds_space: bool
    """Whether a space is added before every text."""
    drops_spaces: bool
    """Whether spaces at the ends of a text, and all but one of several, are removed."""

    def with_control(self, names: Collection[str], adds_space: bool) -> bytes:
        """The same model with these pieces as control pieces, so that their names in a text are text."""
        made = bytearray()
        number = 0
        for field, start, payload, end in _fields(self.content):
            if field == _PIECES:
                changed = self.kinds[number][0] in names
                number += 1
                if changed:
                    body = self.content[payload:end] + _tag(3, _VARINT) + bytes([CONTROL])
                    made += _tag(_PIECES, _LENGTH) + _varint(len(body)) + body
                    continue
            if field != _SELF_TEST:  # of what the unchanged model gives
                made += self.content[start:end]
        spec = _tag(3, _VARINT) + bytes([adds_space])
        return bytes(made + _tag(_NORMALIZER, _LENGTH) + _varint(len(spec)) + spec)


def read_piece_file(content: bytes) -> PieceFile:
    """Raises:
    ValueError: not such a file.
    """
    kinds: list[tuple[str, int]] = []
    name, spaces = "", {3: True, 4: True}
    for field, _, payload, end in _fields(content):
        if field == _PIECES:
            piece, kind = "", NORMAL
            for inner, at, value, stop in _fields(content, payload, end):
                if inner == 1:
                    piece = content[value:stop].decode()
                elif inner == 3:
                    kind = _read_varint(content, _after_tag(content, at))[0]
            kinds.append((piece, kind))
        elif field == _NORMALIZER:
            for inner, at, value, stop in _fields(content, payload, end):
                if inner == 1:
                    name = content[value:stop].decode()
                elif inner in spaces:
                    spaces[inner] = bool(_read_varint(content, _after_tag(content, at))[0])
    return PieceFile(content, tuple(kinds), name, spaces[3], spaces[4])


def _fields(content: bytes, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Iterate over (number, start, start of the payload, end) of each field of a message."""
    end = len(content) if end is None else end
    while at < end:
        start = at
        tag, at = _read_varint(content, at)
        kind, payload = tag & 7, at
        if kind == _VARINT:
            at = _read_varint(content, at)[1]
        elif kind == _LENGTH:
            length, payload = _read_varint(content, at)
            at = payload + length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field of kind {kind} at byte {start}")
        if at > end:
            raise ValueError(f"a field at byte {start} that does not end")
        yield tag >> 3, start, payload, at


def _after_tag(content: bytes, at: int) -> int:
    return _read_varint(content, at)[1]


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(content) or shift > 63:
            raise ValueError(f"a number at byte {at} that does not end")
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
