# SPDX-License-Identifier: Apache-2.0
"""Tokenizers for tests, small and in published formats."""

import tokenizers

from codegeex.byte_level import bytes_of
from codegeex.glm_tokenizer import GLM4_SPECIAL, GLM4Tokenizer

MERGES = [(b"t", b"h"), (b"th", b"e"), ("小".encode()[:2], "小".encode()[2:]), ("小".encode()[:1], "小".encode()[1:2])]


def glm4_json(folder):
    """A byte-level BPE whose first 256 tokens are the bytes."""
    signs = {bytes_of(sign)[0]: sign for sign in tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    parts = [bytes([byte]) for byte in range(256)]
    merges = sorted(MERGES, key=lambda pair: len(b"".join(pair)))
    parts += [first + second for first, second in merges]
    shown = ["".join(signs[byte] for byte in part) for part in parts]
    pairs = [tuple("".join(signs[byte] for byte in part) for part in pair) for pair in merges]
    whole = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={name: place for place, name in enumerate(shown)}, merges=pairs)
    )
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.add_special_tokens([*GLM4_SPECIAL[:10], "<|unheard_of|>"])
    whole.save(str(folder / "tokenizer.json"))
    return GLM4Tokenizer(folder / "tokenizer.json")
