# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from sporeloom.data.sample_order import Shares, Sizes, epoch_samples, growing_seq_lens, ramped_batch_sizes, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_a_shuffle_shows_everything_once(size):
    order = shuffled(np.arange(size), size, key=7)
    assert sorted(order) == list(range(size))
    if size > 100:
        assert (order != shuffled(np.arange(size), size, key=8)).mean() > 0.9
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.1
    places = np.array([0, size - 1])
    assert shuffled(places, size, key=7).tolist() == order[places].tolist()  # any place alone


def test_pairs_of_neighbours_are_torn_apart():
    gaps = np.abs(np.diff(shuffled(np.arange(10_000), 10_000, key=3)))
    assert np.percentile(gaps, 5) > 100
    assert 2900 < gaps.mean() < 3800  # 3333 for a random order


def test_each_epoch_is_another_order_of_everything():
    draws = epoch_samples(0, 35, 10, key=1)
    epochs = [draws[i : i + 10].tolist() for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epoch_samples(13, 9, 10, key=1).tolist() == draws[13:22].tolist()


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_the_count_of_every_dataset_is_within_a_sample_of_its_weight(batch):
    rng = np.random.default_rng(batch)
    for num_datasets in (1, 2, 7, 40):
        weights = rng.dirichlet(np.full(num_datasets, 0.5)) + 1e-6
        shares = Shares(weights, Sizes((batch,), (8,)))
        before = np.zeros(num_datasets, int)
        for step in range(1, 300):
            drawn = shares.before(step)
            assert drawn.sum() == step * batch
            assert (drawn >= before).all()
            assert np.abs(drawn - step * batch * shares.weights).max() < 1.5
            before = drawn


def test_shares_do_not_depend_on_which_step_was_asked_first():
    sizes = Sizes((2, 4, 6), (8,))
    whole, back = Shares((0.6, 0.3, 0.1), sizes), Shares((0.6, 0.3, 0.1), sizes)
    expected = [whole.before(step).tolist() for step in range(3000)]
    for step in (2999, 5, 1024, 1023, 2048, 0, 2047):
        assert back.before(step).tolist() == expected[step]


def test_batches_grow_by_sequences_or_by_tokens():
    sizes = ramped_batch_sizes(4, 4, 48, 16)  # three increments, one for each 16 sequences
    assert sizes == (4, 4, 4, 4, 8, 8, 12, 12, 16)
    assert ramped_batch_sizes(4, 4, 48 * 32, 16, lambda step: 32) == sizes
    assert ramped_batch_sizes(16, 4, 48, 16) == (16,)
    for wrong in ((4, 5, 48, 16), (0, 4, 48, 16), (20, 4, 48, 16), (4, 0, 48, 16), (4, 4, 0, 16)):
        with pytest.raises(ValueError, match="is not a multiple of"):
            ramped_batch_sizes(*wrong)


def test_lengths_grow_and_samples_are_counted_in_the_longest():
    lens = growing_seq_lens([(16, 2), (32, 1)], 64)
    assert lens == (16, 16, 32, 64)
    sizes = Sizes((4, 8), lens)
    assert [sizes.of_step(step) for step in range(5)] == [(4, 16), (8, 16), (8, 32), (8, 64), (8, 64)]
    assert [sizes.samples_of_step(step) for step in range(5)] == [1, 2, 4, 8, 8]
    assert sizes.shapes() == [(4, 16), (8, 16), (8, 32), (8, 64)]
    assert not sizes.problems()
    assert "multiples of 4" in Sizes((6,), lens).problems()[0]
    assert "24 does not divide" in Sizes((8,), (24, 64)).problems()[0]
    with pytest.raises(ValueError, match="grow"):
        growing_seq_lens([(32, 2), (16, 1)], 64)
