# SPDX-License-Identifier: Apache-2.0
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from sporeloom.data.batch import dropout_keys
from sporeloom.dry_run.memory.liveness import lifetimes
from sporeloom.nn.dropout import AttentionDropout, Dropout, number_dropouts
from sporeloom.partition.mindir import read_graph
from sporeloom.runtime.spmd.compile import compile_for_one_device

RATE, B, T, D = 0.1, 8, 64, 256


def mask(cell, keys, shape, site=0):
    cell.site = site
    return cell.set_train()(Tensor(np.ones(shape, np.float32)), Tensor(keys)).asnumpy() != 0


def masks_of_rows(site=0, seed=1, first_sample=0):
    return mask(Dropout(RATE), dropout_keys(seed, first_sample * T, (B, T)), (B * T, D), site)


def test_the_rate_holds_over_all_rows_and_columns():
    dropped = ~masks_of_rows()
    error = np.sqrt(RATE * (1 - RATE))
    assert abs(dropped.mean() - RATE) < 4 * error / np.sqrt(dropped.size)
    assert np.abs(dropped.mean(0) - RATE).max() < 5 * error / np.sqrt(B * T)
    assert np.abs(dropped.mean(1) - RATE).max() < 5 * error / np.sqrt(D)


def test_what_is_kept_is_scaled_up():
    ones = Tensor(np.ones((B * T, D), np.float32))
    y = Dropout(RATE).set_train()(ones, Tensor(dropout_keys(1, 0, (B, T)))).asnumpy()
    assert np.unique(y).tolist() == [0.0, np.float32(1 / (1 - RATE))]
    assert (Dropout(RATE).set_train(False)(ones, None).asnumpy() == 1).all()
    assert (Dropout(0.0).set_train()(ones, None).asnumpy() == 1).all()


def correlations(a, b):
    """Of the columns of two masks, in units of what chance gives."""
    a, b = ((m - m.mean(0)) / (m.std(0) + 1e-9) for m in (a.astype(float), b.astype(float)))
    return a.T @ b / np.sqrt(len(a))


def test_columns_and_rows_know_nothing_of_each_other():
    for dropped in (masks_of_rows(), masks_of_rows().T):
        found = correlations(dropped, dropped)
        np.fill_diagonal(found, 0)
        assert np.abs(found).max() < 6.5
        assert abs(found.std() - 1) < 0.05


@pytest.mark.parametrize("other", [{"site": 1}, {"seed": 2}, {"first_sample": B}])
def test_other_places_seeds_and_samples_have_other_masks(other):
    found = correlations(masks_of_rows(), masks_of_rows(**other))
    assert np.abs(found).max() < 6.5
    assert abs(found.std() - 1) < 0.05


def test_heads_have_their_own_masks():
    dropped = mask(AttentionDropout(RATE), dropout_keys(1, 0, (B, T)), (B, 4, T, T))
    assert abs(dropped.mean() - (1 - RATE)) < 0.003
    found = correlations(dropped[:, 0].reshape(-1, T), dropped[:, 3].reshape(-1, T))
    assert np.abs(found).max() < 6.5
    assert abs(found.std() - 1) < 0.05


def test_keys_are_a_function_of_seed_and_place():
    whole = dropout_keys(7, 0, (B, T))
    assert (dropout_keys(7, 3 * T, (B - 3, T)) == whole[3:]).all()
    assert len(np.unique(whole)) == B * T
    for seed in (8, -7, 7 + 2**24, 7 + 2**32, 2**63 - 1):
        assert not np.intersect1d(whole, dropout_keys(seed, 0, (B, T))).size
    assert whole.dtype == ms.dtype_to_nptype(ms.int32)


def test_masks_of_layers_are_computed_one_after_another():
    """As MindSpore's executor runs a graph, which starts what is ready."""

    class Layers(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layers = nn.CellList([Dropout(RATE) for _ in range(4)])
            self.relu = ops.ReLU()
            number_dropouts(self)

        def construct(self, x, keys):
            for layer in self.layers:
                x = self.relu(layer(x, keys))
            return x

    model = compile_for_one_device(Layers().set_train(), [((B * T, D), np.float32), ((B, T), np.int32)])
    found = lifetimes(read_graph(model))
    size = B * T * D * 4
    is_mask = [bool(m) and m.kind == "Add" and s == size for s, m in zip(found.sizes, found.makers, strict=True)]
    live = most = 0
    for born, dying in zip(found.born, found.dying, strict=True):
        live += sum(is_mask[number] for number in born)
        most = max(most, live)
        live -= sum(is_mask[number] for number in dying)
    assert sum(is_mask) == 8  # two factors of each
    assert most == 2
