# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from conftest import shared

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import document_positions, make_batch
from sporeloom.data.documents import read_documents

EOD, IGNORED = 9, 6


def brute_force_positions(row):
    """The original's loop: after each end-of-document token positions start anew."""
    positions, previous = list(range(len(row))), 0
    for i, token in enumerate(row):
        if token == EOD:
            for j in range(i + 1, len(row)):
                positions[j] -= i + 1 - previous
            previous = i + 1
    return positions


def test_positions_start_anew_after_an_end_of_document():
    tokens = np.random.RandomState(0).choice([EOD, 1, 2, 3], size=(50, 20))
    expected = [brute_force_positions(row) for row in tokens]
    assert document_positions(tokens, EOD).tolist() == expected
    assert (document_positions(tokens, None) == np.arange(20)).all()


def test_positions_equal_the_originals():
    golden = np.load(shared("golden/pangu_case_a.npz"))
    assert (document_positions(golden["golden.input_ids"], EOD) == golden["golden.position_ids_eod_reset"]).all()


def test_the_loss_weights_hold_the_denominator_of_the_whole_batch():
    batch = make_batch(np.array([[1, 2, IGNORED, 4], [5, IGNORED, IGNORED, 8]]), EOD, IGNORED)
    assert batch.tokens.tolist() == [[1, 2, 6], [5, 6, 6]]
    assert batch.labels.tolist() == [[2, 6, 4], [6, 6, 8]]
    np.testing.assert_allclose(batch.loss_weights, np.array([[1, 1, 0], [1, 0, 0]]) / (3 + 1e-5), rtol=1e-6)


def test_the_denominator_can_be_that_of_rows_which_are_not_here():
    samples = np.random.RandomState(1).randint(0, 10, (6, 9))
    whole = make_batch(samples, EOD, IGNORED)
    some = make_batch(samples[2:4], EOD, IGNORED, num_trained=int((samples[:, :-1] != IGNORED).sum()))
    assert (some.loss_weights == whole.loss_weights[2:4]).all()


def test_documents_of_both_kinds_of_file(write):
    assert read_documents(write("a.jsonl", '{"text": "one"}\n\n{"text": "two", "id": 2}\n')) == ["one", "two"]
    assert read_documents(write("a.txt", "one\nmore\n\ntwo\n")) == ["one\nmore", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: contains no text"),
        ("a.txt", b" \n\n \n", "a.txt: contains no text"),
        ("a.txt", b"good\nbad \xb0\xa1\n", "a.txt:2: not UTF-8 text"),
        ("a.jsonl", b'{"text": "x"}\n{"title": "y"}\n', "a.jsonl:2: no `text` field with a string; found: title"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "a.jsonl:2: no `text` field with a string"),
        ("a.jsonl", b'{"text": "x"\n', "a.jsonl:1: not JSON"),
    ],
)
def test_each_broken_file_is_named_with_its_line(write, name, content, message):
    with pytest.raises(ConfigError) as caught:
        read_documents(write(name, content))
    assert message in str(caught.value)


def test_many_broken_lines_are_summed_up(write):
    with pytest.raises(ConfigError, match="and 15 more lines"):
        read_documents(write("a.jsonl", '{"title": "y"}\n' * 20))
