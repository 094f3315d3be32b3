# SPDX-License-Identifier: Apache-2.0
"""How documents become samples: shuffled windows and best fit, against counting by hand."""

import numpy as np
import pytest
from test_blend_and_loader import EOD, IGNORED, token_file

from sporeloom.data.loader import Dataset, Loader, rows_of_rank
from sporeloom.data.packing import BestFit, ShuffledStream, Stream, best_fit, save_packing
from sporeloom.data.sample_order import Sizes

SEQ_LEN = 24


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("tokens") / "a", 1, num_tokens=3000)


@pytest.fixture(scope="module")
def packed(tokens, tmp_path_factory):
    path = tmp_path_factory.mktemp("packing") / "p.npz"
    save_packing(tokens, SEQ_LEN, path)
    return BestFit(tokens, SEQ_LEN, path)


def documents(tokens):
    return [tokens.tokens[begin:end] for begin, end in zip([0, *tokens.ends[:-1]], tokens.ends, strict=True)]


def read(tokens, pieces):
    return np.concatenate([tokens.tokens[begin:end] for begin, end in pieces])


def test_windows_of_shuffled_documents_are_those_of_the_documents_in_another_order(tokens):
    shuffled, orders = ShuffledStream(tokens, SEQ_LEN, key=7), []
    for epoch in range(3):
        windows = [read(tokens, shuffled.pieces(epoch, sample)) for sample in range(shuffled.num_samples)]
        assert {len(window) for window in windows} == {SEQ_LEN + 1}
        stream = np.concatenate([window[:-1] for window in windows])
        assert [w[0] for w in windows[1:]] == [w[-1] for w in windows[:-1]]  # each token is predicted once
        found = [part.tolist() for part in np.split(stream, np.flatnonzero(stream == EOD) + 1)][:-1]
        orders.append(found)
        own = sorted(document.tolist() for document in documents(tokens))
        left = list(own)
        for document in found:
            left.remove(document)
        assert sum(map(len, left)) <= SEQ_LEN + len(stream) - sum(map(len, found)) + 1  # but for the epoch's tail
    assert orders[0] != orders[1] != orders[2]
    again = ShuffledStream(tokens, SEQ_LEN, key=7)
    assert (
        again.pieces(2, 5).tolist()
        == shuffled.pieces(2, 5).tolist()
        != ShuffledStream(tokens, SEQ_LEN, 8).pieces(2, 5).tolist()
    )


def oracle_best_fit(lengths, room):
    """Row of each item, by looking at all rows each time."""
    left, rows = [], {}
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        fitting = [row for row, rest in enumerate(left) if rest >= lengths[place]]
        row = min(fitting, key=lambda row: left[row]) if fitting else len(left)
        left += [room] if not fitting else []
        left[row] -= lengths[place]
        rows.setdefault(row, []).append(place)
    return left


@pytest.mark.parametrize("seed", range(5))
def test_items_are_put_where_the_least_room_is_left(seed):
    lengths = np.random.default_rng(seed).integers(1, 33, 300).tolist()
    rows = best_fit(lengths, 32)
    assert sorted(place for row in rows for place in row) == list(range(300))
    rest = sorted(32 - sum(lengths[place] for place in row) for row in rows)
    assert rest == sorted(oracle_best_fit(lengths, 32))
    assert best_fit([], 5) == []


def test_no_document_is_cut_that_fits_and_every_token_is_predicted_once(tokens, packed):
    whole, predicted = set(), np.zeros(len(tokens.tokens), int)
    for sample in range(packed.num_samples):
        pieces = packed.pieces(0, sample)
        assert (pieces[:, 1] - pieces[:, 0]).sum() <= SEQ_LEN + 1
        for begin, end in pieces:
            whole.add((int(begin), int(end)))
            predicted[begin + 1 : end] += 1
    begins = [0, *tokens.ends[:-1].tolist()]
    lengths = np.diff(tokens.ends, prepend=0)
    assert (lengths > SEQ_LEN + 1).any()
    for begin, end, length in zip(begins, tokens.ends.tolist(), lengths, strict=True):
        assert length > SEQ_LEN + 1 or (begin, end) in whole
    expected = np.ones(len(tokens.tokens), int)
    expected[begins] = 0  # the first of a document is predicted by none of its own
    np.testing.assert_array_equal(predicted, expected)
    padding = 1 - sum(end - begin for begin, end in whole) / (packed.num_samples * (SEQ_LEN + 1))
    assert packed.describe() == (
        f"best fit: {padding:.2%} padding, {(lengths > SEQ_LEN + 1).sum()} of {len(lengths)} documents split"
    )


@pytest.mark.parametrize("kind", ["stream", "shuffled", "best-fit"])
def test_weights_count_what_is_trained_on_and_ranks_read_the_same(tokens, packed, kind):
    of = {"stream": Stream(tokens, SEQ_LEN), "shuffled": ShuffledStream(tokens, SEQ_LEN, 3), "best-fit": packed}[kind]
    datasets, sizes = [Dataset("a", tokens, 1.0, tokens.places_of(IGNORED), of)], Sizes((8,), (SEQ_LEN,))
    whole = Loader(datasets, sizes, 1, EOD, IGNORED)
    for step in (0, 3, 40):
        drawn, batch = whole.drawn(step), whole.batch(step)
        for row, (epoch, sample) in enumerate(zip(drawn.epochs, drawn.samples, strict=True)):
            expected = read(tokens, of.pieces(int(epoch), int(sample)))
            count = len(expected) - 1
            np.testing.assert_array_equal(batch.tokens[row, :count], expected[:-1])
            np.testing.assert_array_equal(batch.labels[row, :count], expected[1:])
            np.testing.assert_array_equal(batch.loss_weights[row, :count] > 0, expected[:-1] != IGNORED)
            assert not batch.loss_weights[row, count:].any()
            assert (batch.labels[row, count:] == -1).all()
            assert (batch.tokens[row, count + 1 :] == EOD).all()
        trained = (batch.loss_weights > 0).sum()
        np.testing.assert_allclose(batch.loss_weights.sum(), trained / (trained + 1e-5), rtol=1e-6)
        for rank in range(2):
            mine = rows_of_rank(2, rank, 1)
            part = Loader(datasets, sizes, 1, EOD, IGNORED, mine).batch(step)
            for name in batch._fields:
                assert getattr(part, name)[mine(8)].tobytes() == getattr(batch, name)[mine(8)].tobytes()
