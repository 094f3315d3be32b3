# SPDX-License-Identifier: Apache-2.0
"""Every token knows its bytes: those of a text's tokens, joined, are the text. On small vocabularies of all formats."""

import base64
import codecs
import random
import unicodedata

import pytest
import tokenizers
from test_new_tokenizers import TEXTS, sentencepiece_model
from vocabularies import glm4_json

from codegeex.glm_tokenizer import GLM2Tokenizer, GLM4Tokenizer
from codegeex.tokenizer import CodeGeeXTokenizer
from codegeex.tokenizer import train_tokenizer as train_codegeex
from palm.tokenizer import PaLMTokenizer
from palm.tokenizer import train_tokenizer as train_palm
from pangu.open_tokenizer import OpenPanguTokenizer
from pangu.tokenizer import PanGuTokenizer
from pangu.tokenizer import train_tokenizer as train_pangu
from sporeloom.data.byte_level import bytes_of
from sporeloom.serve.token_texts import token_offsets, token_text

WRITTEN = [
    "é🙂小 x",
    "The  fox\n\n  jumps",
    "小城在山脚下",
    "a\tb",
    " leading",
    "e\u0301\u200d\U0001f468\u200d\U0001f469",
    "naïve ½ — «»",
    "x",
]


def glm4_ranks(folder):
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", "小".encode()]
    lines = [base64.b64encode(token) + f" {place}\n".encode() for place, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return GLM4Tokenizer(folder / "tokenizer.model")


def of_pieces(kind, content):
    def make(folder):
        (folder / "tokenizer.model").write_bytes(content())
        return kind(folder / "tokenizer.model")

    return make


def codegeex(folder):
    (folder / "tokenizer.json").write_bytes(train_codegeex(TEXTS, 500))
    return CodeGeeXTokenizer(folder / "tokenizer.json")


TOKENIZERS = {
    "codegeex": codegeex,
    "codegeex2": of_pieces(GLM2Tokenizer, sentencepiece_model),
    "codegeex4 json": glm4_json,
    "codegeex4 ranks": glm4_ranks,
    "openpangu": of_pieces(
        OpenPanguTokenizer, lambda: sentencepiece_model(user_defined_symbols=[f"[unused{i}]" for i in range(12)])
    ),
    "pangu": of_pieces(PanGuTokenizer, lambda: train_pangu(TEXTS, 600)),
    "palm": of_pieces(PaLMTokenizer, lambda: train_palm(TEXTS, 400)),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tmp_path_factory):
    return TOKENIZERS[request.param](tmp_path_factory.mktemp("tokenizer"))


def test_signs_are_those_of_the_library():
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, range(1, 0x800)):
        ((shown, _),) = level.pre_tokenize_str(character)
        assert bytes_of(shown) == character.encode()
    assert bytes_of("  ") == b"  " and bytes_of("小") == "小".encode()  # added tokens are written plainly


@pytest.mark.parametrize("text", WRITTEN)
def test_the_bytes_of_a_texts_tokens_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined in (tokenizer.decode(ids), " " + tokenizer.decode(ids))  # SentencePiece puts a space in front
    if not isinstance(tokenizer, PanGuTokenizer):  # which folds full width and drops tabs
        folds = isinstance(tokenizer, OpenPanguTokenizer | GLM2Tokenizer)
        kept = " ".join(unicodedata.normalize("NFKC", text).split()) if folds else text
        assert joined.removeprefix(" ") == kept.removeprefix(" ")


def test_the_bytes_of_any_tokens_are_what_is_decoded(tokenizer):
    draw, compared = random.Random(3), 0
    starts_text = [*getattr(tokenizer, "prefix", [])][:1]
    for _ in range(3000):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(1, 4))]
        joined = b"".join(map(tokenizer.token_bytes, ids))
        text = joined.decode(errors="replace")
        if "\ufffd" not in text and ids[:1] != starts_text:
            assert tokenizer.decode(ids) == text, ids
            compared += 1
    assert compared > 100


def test_a_continued_text_keeps_every_space_in_front(write):
    tokenizer = OpenPanguTokenizer(
        write("tokenizer.model", sentencepiece_model(user_defined_symbols=[f"[unused{i}]" for i in range(12)]))
    )
    space, fox = tokenizer.pieces.piece_to_id("▁"), tokenizer.pieces.encode("fox")
    assert tokenizer.decode([space, space, *fox]) == "   fox"  # as a stream of single tokens gives it
    assert tokenizer.decode([*tokenizer.prefix, *fox]) == "fox"


def test_tokens_of_all_ids_have_names_of_their_own_or_ids(tokenizer):
    for token in range(tokenizer.vocab_size + 3):
        text, found = token_text(tokenizer, token), tokenizer.token_bytes(token)
        assert text
        if text.startswith("bytes:"):
            assert codecs.escape_decode(text.removeprefix("bytes:").encode())[0] == found
        elif found:
            assert text == found.decode()
    assert token_text(tokenizer, tokenizer.vocab_size + 2) == f"token_id:{tokenizer.vocab_size + 2}"
    assert token_text(tokenizer, tokenizer.eod_id) in ("<|endoftext|>", "</s>", "[unused10]", "<eot>")


@pytest.mark.parametrize("text", WRITTEN)
def test_offsets_are_where_characters_begin(tokenizer, text):
    """Of tokens that are bytes: as many as a character has begin at it."""
    ids = tokenizer.encode(text)
    offsets = token_offsets(tokenizer, ids, text)
    assert len(offsets) == len(ids) and offsets == sorted(offsets) and offsets[-1] <= len(text)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    if joined in (text, " " + text):  # else encoding changed the text
        start = len(text.encode()) - len(joined.encode())
        for token, offset in zip(ids, offsets, strict=True):
            assert offset == len(text.encode()[: max(start, 0)].decode(errors="ignore"))
            start += len(tokenizer.token_bytes(token))


def test_special_tokens_that_were_written_out_take_their_place(tmp_path):
    tokenizer = glm4_json(tmp_path)
    text = "<|user|>the<|assistant|>x"
    assert token_offsets(tokenizer, tokenizer.encode(text), text) == [0, 0, 0, 8, 11, 24]


def test_other_special_tokens_of_the_file_have_no_bytes(tmp_path):
    tokenizer = glm4_json(tmp_path)
    token = tokenizer.vocab_size - 1
    assert (tokenizer.token_bytes(token), token_text(tokenizer, token)) == (b"", "<|unheard_of|>")
