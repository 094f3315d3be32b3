# SPDX-License-Identifier: Apache-2.0
"""The tokenizers of CodeGeeX2 (ChatGLM2's: SentencePiece and five tokens more) and CodeGeeX4 (GLM-4's: byte-level BPE in
tiktoken's form, or a tokenizer.json), and the forms of their prompts.

Source: THUDM/codegeex2-6b tokenization_chatglm.py; THUDM/codegeex4-all-9b config.json; THUDM/CodeGeeX4 guides. The released
vocabularies are not at hand here: these are tested on files made in their formats.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import tiktoken
import tokenizers

from codegeex.byte_level import bytes_of
from sporeloom.data.pieces import PieceTokenizer, encode_with
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.errors import ConfigError
from sporeloom.lines import first_line, split_lines

GLM2_SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
GLM4_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
GLM4_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*")


class GLM2Tokenizer(PieceTokenizer):
    """Reads ChatGLM2's tokenizer.model. Every text begins with [gMASK] sop."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        count = self.pieces.get_piece_size()
        ids = {name: count + i for i, name in enumerate(GLM2_SPECIAL)}
        self.special = {name: i for name, i in ids.items() if name.startswith("[")}  # sop and eop may be words
        self.prefix = [ids["[gMASK]"], ids["sop"]]
        self.eod_id: int = self.pieces.eos_id()

    @property
    def vocab_size(self) -> int:
        return self.pieces.get_piece_size() + len(GLM2_SPECIAL)

    def token_name(self, token: int) -> str | None:
        place = token - self.pieces.get_piece_size()
        return GLM2_SPECIAL[place] if 0 <= place < len(GLM2_SPECIAL) else super().token_name(token)

    def chat(self, messages: Sequence[ChatMessage]) -> str:
        """Rounds of questions and answers, up to where the last answer begins."""
        text, number = "", 1
        for message in messages:
            if message.role == "assistant":
                text += f"{message.content}\n\n"
            else:
                text += f"[Round {number}]\n\n问：{message.content}\n\n答："
                number += 1
        return text


class GLM4Tokenizer:
    """Reads GLM-4's tokenizer.model (tiktoken's lines of a token and its rank) or its tokenizer.json. Every text begins with
    [gMASK]<sop>."""

    benchmark_form = "chat"
    """How HumanEval-X asks such a model."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.file_name = "tokenizer.json" if self.path.suffix == ".json" else "tokenizer.model"
        if self.file_name == "tokenizer.json":
            self._whole = _open_json(self.path)
            ids = {name: self._whole.token_to_id(name) for name in GLM4_SPECIAL}
            self.special = {name: i for name, i in ids.items() if i is not None}
            self._size = self._whole.get_vocab_size()
        else:
            places = _read_places(self.path)
            self.special = {name: len(places) + i for i, name in enumerate(GLM4_SPECIAL)}
            self._bpe = tiktoken.Encoding(
                "glm4", pat_str=GLM4_PIECES, mergeable_ranks=places, special_tokens=self.special
            )
            self._size = len(places) + len(GLM4_SPECIAL)
        self.prefix = [self.special["[gMASK]"], self.special["<sop>"]]
        self.eod_id: int = self.special["<|endoftext|>"]
        self._names = {i: name for name, i in self.special.items()}

    @property
    def vocab_size(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        """Token ids; names of special tokens in the text are these tokens."""
        return self.prefix + encode_with(text, self.special, self._encode_text)

    def encode_document(self, text: str) -> list[int]:
        """Token ids of a text of a corpus, in which a name of a special token is text."""
        return self.prefix + self._encode_text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text; special tokens are left out."""
        own = [int(i) for i in ids if int(i) < self._size and int(i) not in self._names]
        return self._whole.decode(own) if self.file_name == "tokenizer.json" else self._bpe.decode(own)

    def token_bytes(self, token: int) -> bytes:
        if token in self._names or not 0 <= token < self._size:
            return b""
        if self.file_name == "tokenizer.json":
            return bytes_of(self._whole.id_to_token(token)) if self._whole.decode([token]) else b""
        return self._bpe.decode_single_token_bytes(token)

    def token_name(self, token: int) -> str | None:
        return self._names.get(token) or (
            self._whole.id_to_token(token) if self.file_name == "tokenizer.json" else None
        )

    def save(self, folder: Path) -> None:
        """Copy the file into a checkpoint folder."""
        shutil.copyfile(self.path, folder / self.file_name)

    def chat(self, messages: Sequence[ChatMessage]) -> str:
        """The published form, up to where the assistant speaks."""
        return "".join(f"<|{m.role}|>\n{m.content}" for m in messages) + "<|assistant|>\n"

    def infill(self, before: str, after: str) -> str:
        """The published form for the middle of a file: what stands behind the gap comes first."""
        block = "###MODE:BLOCK\n"
        gap = f"<|code_suffix|>{after}<|code_prefix|>{before}<|code_middle|>"
        return f"<|user|>\n{block}{gap}<|assistant|>\n"

    def _encode_text(self, text: str) -> list[int]:
        if self.file_name == "tokenizer.json":
            ids: list[int] = self._whole.encode(text, add_special_tokens=False).ids
            return ids
        return self._bpe.encode_ordinary(text)


def is_glm4(path: Path) -> bool:
    """Whether a file is GLM-4's tokenizer, in one form or the other."""
    try:
        if path.suffix == ".json":
            tokens = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
            return any(token.get("content") == "<|observation|>" for token in tokens)
        with path.open("rb") as file:
            return TIKTOKEN_LINE.fullmatch(file.readline(200)) is not None
    except (OSError, ValueError, AttributeError):
        return False


def _open_json(path: Path) -> tokenizers.Tokenizer:
    try:
        whole = tokenizers.Tokenizer.from_file(str(path))
        whole.encode_special_tokens = True  # names of special tokens are text unless we say otherwise
        return whole
    except Exception as error:  # the library raises plain exceptions
        raise ConfigError(f"{path}: not a tokenizer: {first_line(error)}") from None


def _read_places(path: Path) -> dict[bytes, int]:
    places = {}
    for number, line in enumerate(split_lines(path.read_bytes()), 1):
        if not line:
            continue
        try:
            token, place = line.split()
            places[base64.b64decode(token, validate=True)] = int(place)
        except (ValueError, binascii.Error):
            raise ConfigError(f"{path}:{number}: not a line of a token in base64 and its rank") from None
    if sorted(places.values()) != list(range(len(places))):
        raise ConfigError(f"{path}: ranks are not 0 .. {len(places) - 1}, each once")
    return places
