# SPDX-License-Identifier: Apache-2.0
"""A bounded sample of a corpus that is streamed."""

import itertools
import tracemalloc
from collections import Counter

import pytest

from sporeloom.data.passages import MAX_PASSAGE_CHARS, cut_passages, sample_passages

DOCUMENTS = ["short", "line\n" * 700, "x" * 2500, "", "a\n\nb\n" + "y" * 1500 + "\nend"]


@pytest.mark.parametrize("text", DOCUMENTS)
def test_passages_are_all_of_a_text_and_none_is_too_long(text):
    parts = list(cut_passages(text))
    assert "".join(parts) == text
    assert all(0 < len(part) <= MAX_PASSAGE_CHARS for part in parts)


def test_a_passage_ends_with_a_line_where_lines_are_short():
    assert [len(part) for part in cut_passages("line\n" * 700)] == [1000, 1000, 1000, 500]
    assert list(cut_passages("ab\n" + "c" * 998)) == ["ab\n", "c" * 998]


def test_a_small_corpus_is_returned_as_it_is():
    sample = sample_passages(DOCUMENTS)
    assert sample.texts == [text for text in DOCUMENTS if text]
    assert sample.num_passages == sample.num_chosen == sum(len(list(cut_passages(text))) for text in DOCUMENTS)


def test_what_lies_apart_in_a_document_is_not_joined():
    document = "".join(f"{number:03}\n" + "z" * 995 + "\n" for number in range(9))
    texts = sample_passages([document], 4, seed=2).texts
    numbers = [[int(part[:3]) for part in cut_passages(text)] for text in texts]
    chosen = list(itertools.chain(*numbers))
    assert len(chosen) == 4 and chosen == sorted(chosen)
    assert all(after[0] > before[-1] + 1 for before, after in itertools.pairwise(numbers))
    assert all(text in document for text in texts)


def test_the_sample_depends_on_the_seed_alone():
    documents = [f"document {number}" for number in range(1000)]
    first = sample_passages(iter(documents), 50, seed=3)
    assert first == sample_passages(iter(documents), 50, seed=3)
    assert first.texts != sample_passages(iter(documents), 50, seed=4).texts
    assert (len(first.texts), first.num_passages, first.num_chosen) == (50, 1000, 50)


def test_every_passage_is_chosen_equally_often():
    documents, times = [str(number) for number in range(40)], 2000
    counts = Counter(text for seed in range(times) for text in sample_passages(documents, 10, seed).texts)
    expected, deviation = times * 10 / 40, (times * 0.25 * 0.75) ** 0.5
    assert set(counts) == set(documents)
    assert max(abs(count - expected) for count in counts.values()) < 4.5 * deviation


def test_no_more_than_the_sample_is_in_memory():
    documents = (f"{number:09}" * 100 for number in range(20_000))  # 18 MB
    tracemalloc.start()
    try:
        sample = sample_passages(documents, 100)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert sample.num_passages == 20_000
