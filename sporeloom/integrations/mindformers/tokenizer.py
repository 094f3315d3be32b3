# SPDX-License-Identifier: Apache-2.0
"""A family's tokenizer with MindFormers' interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from sporeloom.integrations.mindformers.library import tokenization


class FamilyTokenizer(tokenization.PreTrainedTokenizer):
    """A tokenizer of this package; it converts text to ids and back by itself."""

    family = ""

    def __init__(self, path: Path, own: Tokenizer):
        self._own, self._path = own, path
        super().__init__(eos_token=str(own.eod_id), pad_token=str(own.eod_id))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *unused: Any, **others: Any) -> FamilyTokenizer:
        """Open the tokenizer in a checkpoint folder."""
        family, model = load_config(Path(folder))
        path = find_tokenizer(family, Path(folder))
        return cls(path, load_tokenizer(family, path, model))

    @property
    def vocab_size(self) -> int:
        return self._own.vocab_size

    @property
    def eos_token_id(self) -> int:
        return self._own.eod_id

    @property
    def pad_token_id(self) -> int:
        return self._own.eod_id

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        """Ids as texts: pieces have no names that all families share."""
        return [str(i) for i in self._own.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token)

    def _convert_id_to_token(self, index: int) -> str:
        return str(index)

    def encode(self, text: str, **unused: Any) -> list[int]:
        return self._own.encode(text)

    def __call__(self, text: Any, padding: bool = False, return_tensors: str | None = None, **unused: Any) -> Any:
        """`input_ids` and `attention_mask` of a text or of several, padded on the right where `padding` is set."""
        one = isinstance(text, str)
        rows = [self._own.encode(t) for t in ([text] if one else text)]
        longest = max(map(len, rows), default=0) if padding else 0
        masks = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        rows = [row + [self._own.eod_id] * (longest - len(row)) for row in rows]
        if return_tensors:
            if return_tensors not in ("np", "ms"):
                raise ConfigError(f"return_tensors is np or ms, got {return_tensors}")
            if len({len(row) for row in rows}) > 1:
                raise ConfigError("texts of several lengths make no array; set padding=True")
            arrays = {"input_ids": np.array(rows, np.int32), "attention_mask": np.array(masks, np.int32)}
            return arrays if return_tensors == "np" else {name: Tensor(array) for name, array in arrays.items()}
        return (
            {"input_ids": rows[0], "attention_mask": masks[0]} if one else {"input_ids": rows, "attention_mask": masks}
        )

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **unused: Any) -> Any:
        """Decode ids to a text, and rows of ids to texts, as MindFormers' pipeline needs it."""
        rows = list(token_ids.asnumpy() if isinstance(token_ids, Tensor) else token_ids)
        if rows and isinstance(rows[0], (list, tuple, np.ndarray)):
            return self.batch_decode(rows, skip_special_tokens)
        return self._own.decode([int(i) for i in rows if not (skip_special_tokens and i == self._own.eod_id)])

    def batch_decode(self, sequences: Sequence[Any], skip_special_tokens: bool = False, **unused: Any) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        self._own.save(Path(save_directory))
        return (str(Path(save_directory) / self._own.file_name),)


class PanGuTokenizer(FamilyTokenizer):
    family = "pangu"


class CodeGeeXTokenizer(FamilyTokenizer):
    family = "codegeex"


class PaLMTokenizer(FamilyTokenizer):
    family = "palm"
