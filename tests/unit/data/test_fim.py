# SPDX-License-Identifier: Apache-2.0
from random import Random

import pytest

from sporeloom.data.fim import FillInTheMiddle
from sporeloom.data.special_tokens import SpecialTokens

PREFIX, SUFFIX, MIDDLE = 1, 2, 3


BEGIN = 4


def encode(text):
    return [ord(c) + 10 for c in text]


class Begins(SpecialTokens):
    """A tokenizer whose texts all begin with a token."""

    prefix = (BEGIN,)

    def encode_text(self, text):
        return encode(text)


def decode(ids):
    return "".join(chr(i - 10) for i in ids if i != BEGIN)


@pytest.mark.parametrize("spm_rate", [0.0, 0.5, 1.0])
def test_every_document_can_be_put_together_again(spm_rate):
    random, fim = Random(0), FillInTheMiddle(PREFIX, SUFFIX, MIDDLE, 0.7, spm_rate)
    texts = [
        "",
        "a",
        "ab",
        *("".join(chr(random.randrange(32, 0xD000)) for _ in range(random.randrange(60))) for _ in range(2000)),
    ]
    rearranged, spm = 0, 0
    for number, text in enumerate(texts):
        ids = fim.encode(text, number, Begins())
        assert fim.decode(ids, decode) == text
        assert ids == fim.encode(text, number, Begins())  # a function of the document's number
        assert ids[0] == BEGIN and ids.count(BEGIN) == 1
        ids = ids[1:]
        special = [i for i in ids if i < 10]
        rearranged += bool(special)
        spm += ids[:2] == [PREFIX, SUFFIX] and len(text) > 20
        assert special in ([], [PREFIX, SUFFIX, MIDDLE])
        assert sorted(i for i in ids if i >= 10) == sorted(encode(text))
    assert abs(rearranged / len(texts) - 0.7) < 3 * (0.7 * 0.3 / len(texts)) ** 0.5
    long = sum(len(text) > 20 for text in texts) * 0.7
    assert abs(spm / long - spm_rate) < 0.1  # a cut at the very beginning looks alike


def test_the_orders_are_the_published_ones():
    psm, spm = (FillInTheMiddle(PREFIX, SUFFIX, MIDDLE, 1.0, rate) for rate in (0.0, 1.0))
    text = "the quick brown fox jumps"
    _, *ids = psm.encode(text, 4, Begins())
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    before, after, between = decode(ids[1:suffix]), decode(ids[suffix + 1 : middle]), decode(ids[middle + 1 :])
    assert before + between + after == text
    rearranged = [PREFIX, SUFFIX, *encode(after), MIDDLE, *encode(before + between)]
    assert spm.encode(text, 4, Begins()) == [BEGIN, *rearranged]


def test_a_rate_of_zero_leaves_everything():
    fim = FillInTheMiddle(PREFIX, SUFFIX, MIDDLE, 0.0)
    assert all(fim.encode("text", number, Begins()) == [BEGIN, *encode("text")] for number in range(100))
