# SPDX-License-Identifier: Apache-2.0
"""CodeGeeX's tokenizer: GPT-2's byte-level BPE, 143 extra tokens, of which nine stand for runs of 2 to 10 spaces.

Source: THUDM/CodeGeeX codegeex/tokenizer. Text is cut into pieces by one expression, and a piece's ids are remembered: source
code repeats itself, so most pieces are looked up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import regex
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from codegeex.glm_tokenizer import GLM2Tokenizer, GLM4Tokenizer, is_glm4
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_bytes, read_gzip, read_utf8
from sporeloom.core.lines import file_lines, first_line
from sporeloom.data.byte_level import bytes_of
from sporeloom.data.special_tokens import SpecialTokens

END_OF_TEXT = "<|endoftext|>"
NUM_EXTRA = 143
FIRST_RUN, LONGEST_RUN = 10, 10  # <|extratoken_10|> is two spaces, <|extratoken_18|> ten
MIN_VOCAB_SIZE = 1 + 256 + NUM_EXTRA
TOKENIZER_KINDS = ("byte-level-bpe",)
"""Kinds that `train_tokenizer` makes."""
MAX_CACHED_PIECES = 1_000_000
MAX_VOCAB_BYTES = 64 << 20
"""Maximum size of vocab.json; the published one has one megabyte."""

# GPT-2's pieces, cut anew at every run of spaces: white space that is not part of such a run is [^\S ] or a single space.
_SPACE = r"(?:[^\S ]| (?! ))"
_PIECES = regex.compile(
    rf" {{2,{LONGEST_RUN}}}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACE}+(?!\S)|{_SPACE}+"
)
_HUGGING_FACE = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "unk_token": END_OF_TEXT,
    "pad_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
}
# What transformers 4.x did to decoded text by default.
_CLEAN_UP = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " 's": "'s"}
_CLEAN_UP |= {" 've": "'ve", " 're": "'re"}


def extra_tokens() -> list[str]:
    """The extra tokens in the order of their ids, those for runs of spaces as the spaces themselves."""
    last = FIRST_RUN + LONGEST_RUN - 2
    return [
        " " * (k - FIRST_RUN + 2) if FIRST_RUN <= k <= last else f"<|extratoken_{k}|>" for k in range(1, NUM_EXTRA + 1)
    ]


class CodeGeeXTokenizer(SpecialTokens):
    """Reads the released files (a folder with vocab.json, plain or gzipped, and merges.txt) or a tokenizer.json."""

    file_name = "tokenizer.json"
    """File name of the tokenizer in a checkpoint folder; the `tokenizers` library's own format."""

    def __init__(self, path: str | Path):
        self._whole = _load(Path(path))
        missing = [token for token in (END_OF_TEXT, *extra_tokens()) if self._whole.token_to_id(token) is None]
        if missing:
            raise ConfigError(f"{path}: not a CodeGeeX tokenizer: it has no token {missing[0]!r}")
        self.eod_id: int = self._whole.token_to_id(END_OF_TEXT)
        self._first_run: int = self._whole.token_to_id("  ")
        self._pieces = _Pieces(self._whole, self._first_run)
        first = self._first_run - FIRST_RUN  # those for runs of spaces have names, too
        self.special = {f"<|extratoken_{k}|>": first + k for k in range(1, NUM_EXTRA + 1)}
        self.special[END_OF_TEXT] = self.eod_id

    @property
    def vocab_size(self) -> int:
        return self._whole.get_vocab_size()

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Token ids; none is added.

        `parse_special`: names of special tokens in the text become these tokens, as in the original. Without it they are
        text like any other, and `decode` gives back every text unchanged.
        """
        return super().encode(text) if parse_special else self.encode_text(text)

    @property
    def variables(self) -> dict[str, str]:
        """Special tokens by the names of chat templates, where no file gives others."""
        return dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT)

    @property
    def token_names(self) -> dict[int, str]:
        runs = range(self._first_run, self._first_run + LONGEST_RUN - 1)
        return {i: name for name, i in self.special.items() if i not in runs}

    def decode(self, ids: Sequence[int], like_the_original: bool = False) -> str:
        """Decode to text. `like_the_original` removes spaces before punctuation, as transformers 4.x did there."""
        if not like_the_original:
            return self._whole.decode([int(i) for i in ids], skip_special_tokens=False)
        text, segment = "", list[int]()
        for i in [*ids, -1]:
            if i < 0 or self._first_run <= i < self._first_run + LONGEST_RUN - 1:
                text += _clean_up(self._whole.decode(segment, skip_special_tokens=False))
                text += " " * (i - self._first_run + 2) if i >= 0 else ""
                segment = []
            else:
                segment.append(int(i))
        return text

    def token_bytes(self, token: int) -> bytes:
        name = self._whole.id_to_token(token)
        return b"" if name is None else bytes_of(name)

    def token_name(self, token: int) -> str | None:
        name: str | None = self._whole.id_to_token(token)
        return name

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and the files that Hugging Face's AutoTokenizer needs with it."""
        self._whole.save(str(folder / self.file_name))
        (folder / "tokenizer_config.json").write_text(json.dumps(_HUGGING_FACE, indent=2) + "\n", encoding="utf-8")

    def encode_text(self, text: str) -> list[int]:
        if len(self._pieces) > MAX_CACHED_PIECES:
            self._pieces.clear()
        return list(chain.from_iterable(map(self._pieces.__getitem__, _PIECES.findall(text))))


class _Pieces(dict[str, list[int]]):
    """Piece -> ids, filled as pieces are met."""

    def __init__(self, whole: tokenizers.Tokenizer, first_run: int):
        super().__init__()
        self._first_run = first_run
        self._bpe = tokenizers.Tokenizer(whole.model)  # without added tokens: a piece is text
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def __missing__(self, piece: str) -> list[int]:
        ids = [self._first_run + len(piece) - 2] if piece.startswith("  ") else self._bpe.encode(piece).ids
        self[piece] = ids
        return ids


def _load(path: Path) -> tokenizers.Tokenizer:
    try:
        if path.is_dir() and not (path / CodeGeeXTokenizer.file_name).is_file():
            return _from_released_files(path)
        file = path / CodeGeeXTokenizer.file_name if path.is_dir() else path
        return tokenizers.Tokenizer.from_str(read_utf8(file))
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # the library raises plain exceptions; JSON and UTF-8 errors are ValueErrors
        raise ConfigError(f"{path}: not a CodeGeeX tokenizer: {first_line(error)}") from None


def _from_released_files(folder: Path) -> tokenizers.Tokenizer:
    plain = folder / "vocab.json"
    content = read_bytes(plain) if plain.exists() else read_gzip(folder / "vocab.json.gz", MAX_VOCAB_BYTES)
    lines = file_lines(folder / "merges.txt")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    return _with_extra_tokens(tokenizers.Tokenizer(models.BPE(vocab=json.loads(content), merges=merges)))


def _with_extra_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in extra_tokens()])
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int, kind: str = TOKENIZER_KINDS[0]) -> bytes:
    """Train a tokenizer.json of at most `vocab_size` tokens, END_OF_TEXT being token 0. `kind`: the only one.

    Raises:
        ConfigError: `vocab_size` leaves no room for the bytes and the extra tokens.
    """
    assert kind in TOKENIZER_KINDS, kind
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"a vocabulary of {vocab_size} is too small for {MIN_VOCAB_SIZE} bytes and special tokens")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_EXTRA,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((regex.sub(" {2,}", "", document) for document in documents), trainer)
    return _with_extra_tokens(tokenizer).to_str().encode()


def _clean_up(text: str) -> str:
    for before, after in _CLEAN_UP.items():
        text = text.replace(before, after)
    return text


def open_tokenizer(path: str | Path) -> CodeGeeXTokenizer | GLM2Tokenizer | GLM4Tokenizer:
    """Open the tokenizer of CodeGeeX, CodeGeeX2 or CodeGeeX4 in a file or folder.

    Raises:
        ConfigError: none of them.
    """
    path = Path(path)
    if path.is_dir():
        path = next((path / name for name in FILE_NAMES if (path / name).is_file()), path)
    if is_glm4(path):
        return GLM4Tokenizer(path)
    return GLM2Tokenizer(path) if path.suffix == ".model" else CodeGeeXTokenizer(path)


FILE_NAMES = ("tokenizer.json", "tokenizer.model")
