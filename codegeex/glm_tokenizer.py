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

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import open_regular, read_bytes, read_utf8
from sporeloom.core.lines import first_line, split_lines
from sporeloom.data.byte_level import bytes_of
from sporeloom.data.pieces import PieceTokenizer, described, has_bytes
from sporeloom.data.special_tokens import Span, SpecialTokens, content, template
from sporeloom.data.tokenizer import ChatMessage

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
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "observation"}
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*")


class GLM2Tokenizer(PieceTokenizer):
    """Reads ChatGLM2's tokenizer.model. Every text begins with [gMASK] sop."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        _check_class(self.path)
        if self.pieces.bos_id() < 0 or self.pieces.eos_id() < 0 or not has_bytes(self.file):
            raise ConfigError(
                f"{path}: not ChatGLM2's tokenizer, which has <s>, </s> and a piece for each byte, but {described(self.file)}"
            )
        count = self.pieces.get_piece_size()
        ids = {name: count + i for i, name in enumerate(GLM2_SPECIAL)}
        self.special = {name: i for name, i in ids.items() if name.startswith("[")}  # sop and eop may be words
        self._added = {i: name for name, i in ids.items()}
        self.prefix = [ids["[gMASK]"], ids["sop"]]
        self.eod_id: int = self.pieces.eos_id()

    @property
    def vocab_size(self) -> int:
        return self.pieces.get_piece_size() + len(GLM2_SPECIAL)

    @property
    def token_names(self) -> dict[int, str]:
        return {**super().token_names, **self._added}

    def token_name(self, token: int) -> str | None:
        return self._added.get(token) or super().token_name(token)

    def chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[Span]:
        """Rounds of questions and answers, up to where the last answer begins."""
        spans: list[Span] = []
        number = 1
        for message in messages:
            if message.role == "assistant":
                spans += [content(message.content), template("\n\n")]
            else:
                spans += [template(f"[Round {number}]\n\n问："), content(message.content), template("\n\n答：")]
                number += 1
        return spans


class GLM4Tokenizer(SpecialTokens):
    """Reads GLM-4's tokenizer.model (tiktoken's lines of a token and its rank) or its tokenizer.json. Every text begins with
    [gMASK]<sop>."""

    benchmark_form = "chat"
    """Prompt form of HumanEval-X for such a model."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.file_name = "tokenizer.json" if self.path.suffix == ".json" else "tokenizer.model"
        if self.file_name == "tokenizer.json":
            self._whole = _open_json(self.path)
            added = self._whole.get_added_tokens_decoder().items()
            self.special = {token.content: i for i, token in added if token.special}
            self._size = self._whole.get_vocab_size()
        else:
            _check_class(self.path)
            places = _read_places(self.path)
            self.special = {name: len(places) + i for i, name in enumerate(GLM4_SPECIAL)}
            self._bpe = tiktoken.Encoding(
                "glm4", pat_str=GLM4_PIECES, mergeable_ranks=places, special_tokens=self.special
            )
            self._size = len(places) + len(GLM4_SPECIAL)
        if missing := [name for name in ("[gMASK]", "<sop>", "<|endoftext|>") if name not in self.special]:
            raise ConfigError(f"{path}: not GLM-4's tokenizer: it has no special token {missing[0]}")
        self.prefix = [self.special["[gMASK]"], self.special["<sop>"]]
        self.eod_id: int = self.special["<|endoftext|>"]

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def variables(self) -> dict[str, str]:
        """Special tokens by the names of chat templates, where no file gives others."""
        return {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text; special tokens are left out."""
        names = self.token_names
        own = [int(i) for i in ids if int(i) < self._size and int(i) not in names]
        return self._whole.decode(own) if self.file_name == "tokenizer.json" else self._bpe.decode(own)

    def token_bytes(self, token: int) -> bytes:
        if token in self.token_names or not 0 <= token < self._size:
            return b""
        if self.file_name == "tokenizer.json":
            return bytes_of(self._whole.id_to_token(token)) if self._whole.decode([token]) else b""
        return self._bpe.decode_single_token_bytes(token)

    def token_name(self, token: int) -> str | None:
        return self.token_names.get(token) or (
            self._whole.id_to_token(token) if self.file_name == "tokenizer.json" else None
        )

    def save(self, folder: Path) -> None:
        """Copy the file into a checkpoint folder."""
        shutil.copyfile(self.path, folder / self.file_name)

    def chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[Span]:
        """The published form, up to where the assistant speaks."""
        spans = [span for m in messages for span in (template(f"<|{ROLES[m.role]}|>\n"), content(m.content))]
        return [*spans, template("<|assistant|>\n")] if add_generation_prompt else spans

    def infill(self, before: str, after: str) -> list[Span]:
        """The published form for the middle of a file: the text after the gap comes first."""
        return [
            *(template("<|user|>\n###MODE:BLOCK\n<|code_suffix|>"), content(after)),
            *(template("<|code_prefix|>"), content(before)),
            template("<|code_middle|><|assistant|>\n"),
        ]

    def encode_text(self, text: str) -> list[int]:
        if self.file_name == "tokenizer.json":
            ids: list[int] = self._whole.encode(text, add_special_tokens=False).ids
            return ids
        return self._bpe.encode_ordinary(text)


def is_glm4(path: Path) -> bool:
    """Whether a file is GLM-4's tokenizer, in one form or the other."""
    try:
        if path.suffix == ".json":
            tokens = json.loads(read_utf8(path)).get("added_tokens", [])
            return any(token.get("content") == "<|observation|>" for token in tokens)
        with open_regular(path) as file:
            return TIKTOKEN_LINE.fullmatch(file.readline(200)) is not None
    except (OSError, ValueError, AttributeError):
        return False


def _check_class(path: Path) -> None:
    """Refuse a file that looks alike, where another file of its folder names another tokenizer.

    Neither ChatGLM2's SentencePiece model nor GLM-4's list of tokens holds its special tokens, by which to know it.
    """
    beside = path.parent / "tokenizer_config.json"
    try:
        name = json.loads(read_utf8(beside)).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return
    if isinstance(name, str) and "GLM" not in name:
        raise ConfigError(f"{path}: not a tokenizer of ChatGLM2 or GLM-4: {beside} says that it is a {name}")


def _open_json(path: Path) -> tokenizers.Tokenizer:
    try:
        whole = tokenizers.Tokenizer.from_str(read_utf8(path))
        whole.encode_special_tokens = True  # names of special tokens are text unless specified otherwise
        return whole
    except Exception as error:  # the library raises plain exceptions
        raise ConfigError(f"{path}: not a tokenizer: {first_line(error)}") from None


def _read_places(path: Path) -> dict[bytes, int]:
    places = {}
    for number, line in enumerate(split_lines(read_bytes(path)), 1):
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
