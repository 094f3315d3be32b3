# SPDX-License-Identifier: Apache-2.0
"""Vocabularies made here in the formats of published ones, which are not at hand."""

import base64
import io
import json

import sentencepiece
import tokenizers

from codegeex.glm_tokenizer import GLM4_SPECIAL, GLM4Tokenizer
from sporeloom.data.byte_level import bytes_of

TEXTS = [
    "小城在山脚下，一条河从城中穿过。",
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x + 1\n",
] * 20
TURNS = [f"[unused{i}]" for i in range(12)]
"""What openPangu's vocabulary has for its conversations."""


MERGES = [(b"t", b"h"), (b"th", b"e"), ("小".encode()[:2], "小".encode()[2:]), ("小".encode()[:1], "小".encode()[1:2])]


def sentencepiece_model(**options):
    model = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, minloglevel=2, **settings
    )
    return model.getvalue()


def glm4_files(folder):
    """The same vocabulary as tiktoken's lines and as a tokenizer.json: all bytes, and a few merges."""
    merges = [(b"t", b"h"), (b"th", b"e"), (b"r", b"e"), (b"re", b"t")]
    tokens = [bytes([i]) for i in range(256)] + [a + b for a, b in merges]
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    signs = _signs()
    shown = ["".join(signs[byte] for byte in token) for token in tokens]
    pairs = [("".join(signs[b] for b in a), "".join(signs[b] for b in c)) for a, c in merges]
    model = tokenizers.models.BPE(vocab={sign: rank for rank, sign in enumerate(shown)}, merges=pairs)
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.add_special_tokens(["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"])
    whole.add_special_tokens(["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"])
    whole.save(str(folder / "tokenizer.json"))


def _signs():
    """GPT-2's visible sign for each byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def write_config(folder, **values):
    """A tokenizer_config.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")


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
