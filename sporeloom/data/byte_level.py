# SPDX-License-Identifier: Apache-2.0
"""The characters that byte-level BPE writes for bytes, so that a vocabulary is text. Source: GPT-2's encoder.py."""

from __future__ import annotations

_SHOWN = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
"""Bytes whose sign is the character of that code; the others take those from 256 on."""
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}


def bytes_of(token: str) -> bytes:
    """Bytes of a token of the vocabulary; one that was added as plain text stands for itself."""
    return bytes(_BYTES[sign] for sign in token) if all(sign in _BYTES for sign in token) else token.encode()
