# SPDX-License-Identifier: Apache-2.0
"""Texts of growing tokens equal what is decoded at once, wherever they are cut, and take time that grows with them alone."""

import random
from types import SimpleNamespace

import pytest
from test_token_bytes import TOKENIZERS, WRITTEN

from sporeloom.inference.formats import MarkedTokenizer
from sporeloom.inference.growing_text import GrowingText
from sporeloom.inference.session import StopConditions
from sporeloom.inference.stopping import at_closed_brace, at_dedent, at_text, first_of


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tmp_path_factory):
    return TOKENIZERS[request.param](tmp_path_factory.mktemp("tokenizer"))


def grow(tokenizer, ids):
    """After each token the text is that of all of them, and what is settled stays."""
    growing, settled = GrowingText(tokenizer), ""
    for place, token in enumerate(ids, 1):
        growing.add(token)
        assert growing.text == tokenizer.decode(ids[:place]), ids[:place]
        assert growing.text.startswith(settled)
        settled = growing.text[: growing.num_settled]
    return growing


def test_texts_and_any_tokens_equal_what_is_decoded_at_once(tokenizer):
    draw = random.Random(3)
    for text in WRITTEN:
        ids = tokenizer.encode_continuation(text * 3)
        growing = grow(tokenizer, ids)
        assert len(growing.text) - growing.num_settled <= 3
    names = [name for _, name in zip(range(6), tokenizer.token_names.values(), strict=False)]
    special = [token for token in tokenizer.token_names if token < tokenizer.vocab_size]
    marked = MarkedTokenizer(tokenizer, names)
    for _ in range(150):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(1, 60))]
        ids = [draw.choice(special) if special and draw.random() < 0.2 else token for token in ids]
        grow(tokenizer, ids)
        if ids[: len(tokenizer.prefix)] != list(tokenizer.prefix):
            grow(marked, ids)


def test_a_whole_prompt_that_is_generated_again_is_decoded_as_one(tokenizer):
    grow(tokenizer, tokenizer.encode("小城 in the valley"))


class Bytes:
    """Counts the tokens that it decodes."""

    vocab_size, eod_id, prefix, num_decoded = 256, 0, (), 0

    def decode(self, ids):
        self.num_decoded += len(ids)
        return bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token):
        return bytes([token])


@pytest.mark.parametrize(
    "unit",
    ["a {b}\n  c", "é", "🙂", b"\x80", b"\xf0\x9f", b"\xf0\x9f\x99", b"\xe5\x80a"],
    ids=lambda unit: repr(unit),
)
def test_the_tokens_decoded_are_a_few_for_each(unit):
    tokenizer, unit = Bytes(), unit.encode() if isinstance(unit, str) else unit
    ids = list(unit * (600 // len(unit)))
    grow(tokenizer, ids)
    tokenizer.num_decoded = 0
    growing = GrowingText(tokenizer)
    for token in ids * 4:
        growing.add(token)
    assert tokenizer.num_decoded < 100 * len(ids) * 4


RULES = {
    "texts": lambda: at_text(["stop", "}x", "\n\n"]),
    "dedent": at_dedent,
    "brace": at_closed_brace,
    "several": lambda: first_of(at_text(["op"]), at_dedent()),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_known_already_changes_no_end(rule):
    draw, ending, found = random.Random(5), RULES[rule](), 0
    for _ in range(2000):
        text = "".join(draw.choices([" ", "\n", "{", "}", "st", "op", "x", "  "], k=draw.randint(1, 14)))
        known = 0
        for length in range(len(text) + 1):
            assert ending(text[:length], known) == ending(text[:length])
            if ending(text[:length]) is not None:
                found += 1
                break
            known = draw.randint(known, length)
    assert found > 100


def test_a_text_ends_where_it_did_when_all_of_it_was_read_after_each_token():
    draw, ended = random.Random(2), 0
    for _ in range(300):
        stops = ["".join(draw.choices("ab🙂", k=draw.randint(1, 4))) for _ in range(2)]
        ids = list("".join(draw.choices("abc🙂", k=20)).encode())
        stop = StopConditions(Bytes(), (), stops)
        is_finished = stop.watch()
        for place in range(1, len(ids) + 1):
            text = bytes(ids[:place]).decode("utf-8", "replace")
            assert is_finished(ids[:place]) == any(each in text for each in stops)
            if any(each in text for each in stops):
                ended += 1
                break
    assert ended > 100


def test_a_text_that_is_watched_at_several_tokens_at_once():
    is_finished = StopConditions(Bytes(), (), ["cd"]).watch()
    assert [is_finished(list(b"abcdef"[:n])) for n in (1, 3)] == [False, False]
    assert is_finished(list(b"abcdef"))


def test_a_token_that_ends_it_is_no_text():
    is_finished = StopConditions(SimpleNamespace(prefix=()), (7,)).watch()
    assert not is_finished([1]) and is_finished([1, 7])
