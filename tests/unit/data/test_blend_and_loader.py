# SPDX-License-Identifier: Apache-2.0
"""The exact batch of every step, whatever the mesh."""

import dataclasses

import numpy as np
import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import make_batch
from sporeloom.data.blend import read_blend, short_datasets
from sporeloom.data.loader import Dataset, Loader, Prefetcher, rows_of_rank
from sporeloom.data.packing import Stream
from sporeloom.data.sample_order import Sizes, growing_seq_lens, ramped_batch_sizes
from sporeloom.data.token_file import ENDS, TOKENS, VERSION, TokenFile, TokenFileInfo, write_info

EOD, IGNORED, SEQ_LEN = 9, 6, 16
GROWING = Sizes(ramped_batch_sizes(4, 4, 40, 12), growing_seq_lens([(4, 3), (8, 4)], SEQ_LEN))


def token_file(folder, seed, num_tokens=1000, record_length=None, **info):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 40, num_tokens).astype("<u2") + 100 * seed
    tokens[rng.random(num_tokens) < 0.1] = EOD
    tokens[rng.random(num_tokens) < 0.1] = IGNORED
    tokens[-1] = EOD
    ends = (np.flatnonzero(tokens == EOD) + 1).astype("<i8")
    folder.mkdir()
    tokens.tofile(folder / TOKENS)
    ends.tofile(folder / ENDS)
    known = {"family": "pangu", "tokenizer": "same", "vocab_size": 500, "eod_id": EOD, **info}
    content = f"content {seed}"
    write_info(
        folder, TokenFileInfo(VERSION, "uint16", num_tokens, len(ends), content, record_length=record_length, **known)
    )
    return TokenFile(folder)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokens")
    files = [token_file(out / name, seed) for seed, name in ((1, "a"), (2, "b"), (3, "c"))]
    weights = (0.5, 0.3, 0.2)
    return [
        Dataset(f.folder.name, f, w, f.places_of(IGNORED), Stream(f, SEQ_LEN))
        for f, w in zip(files, weights, strict=True)
    ]


def loader(datasets, sizes=GROWING, rows=np.arange, seed=5):
    return Loader(datasets, sizes, seed, EOD, IGNORED, rows)


def test_a_batch_is_its_samples_one_after_another(datasets):
    whole = loader(datasets)
    for step in range(20):
        drawn, tokens = whole.drawn(step), whole.samples(step)
        batch, length = GROWING.of_step(step)
        assert tokens.shape == (batch, length + 1)
        stream = tokens.reshape(len(drawn.samples), -1, length + 1)
        for parts, dataset, sample in zip(stream, drawn.datasets, drawn.samples, strict=True):
            start = sample * SEQ_LEN
            expected = datasets[dataset].tokens.tokens[start : start + SEQ_LEN + 1]
            assert np.concatenate([*(part[:-1] for part in parts), parts[-1, -1:]]).tolist() == expected.tolist()


def test_the_ids_a_network_is_given_tell_their_domain(datasets):
    sets = [dataclasses.replace(each, offset=500 * domain) for each, domain in zip(datasets, (1, 0, 2), strict=True)]
    for step in range(6):
        plain, told, drawn = loader(datasets).batch(step), loader(sets).batch(step), loader(sets).drawn(step)
        of_row = np.repeat([500 * (1, 0, 2)[n] for n in drawn.datasets], len(plain.tokens) // len(drawn.datasets))
        np.testing.assert_array_equal(told.tokens, plain.tokens + of_row[:, None])
        for name in ("labels", "positions", "loss_weights"):
            np.testing.assert_array_equal(getattr(told, name), getattr(plain, name))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_ranks_together_read_the_same_batch_for_every_degree(datasets, dp, microbatches):
    sizes = Sizes((8, 8, 16), (4, 8, SEQ_LEN))
    whole = loader(datasets, sizes)
    ranks = [loader(datasets, sizes, rows_of_rank(dp, rank, microbatches)) for rank in range(dp)]
    for step in (0, 1, 2, 3, 700):
        expected = whole.batch(step)
        batches = [rank.batch(step) for rank in ranks]
        for rank, batch in enumerate(batches):
            mine = rows_of_rank(dp, rank, microbatches)(len(expected.tokens))
            assert len(mine) == len(expected.tokens) // dp
            for name in expected._fields:
                assert getattr(batch, name)[mine].tobytes() == getattr(expected, name)[mine].tobytes(), name
            others = np.setdiff1d(np.arange(len(expected.tokens)), mine)
            assert not batch.tokens[others].any()


def test_a_step_is_the_same_wherever_a_run_resumes(datasets):
    whole, resumed = loader(datasets), loader(datasets)
    expected = [whole.batch(step) for step in range(30)]
    for step in (17, 18, 29, 3):
        found = resumed.batch(step)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected[step], strict=True))
        assert resumed.first_token(step) == sum(batch.tokens.size for batch in expected[:step])
    assert (loader(datasets, seed=6).batch(0).tokens != expected[0].tokens).any()


def test_the_loss_weights_are_those_of_the_whole_batch(datasets):
    whole = loader(datasets)
    for step in range(12):
        assert (
            whole.batch(step).loss_weights.tobytes()
            == make_batch(whole.samples(step), EOD, IGNORED).loss_weights.tobytes()
        )


def test_every_sample_of_a_dataset_is_seen_once_an_epoch(datasets):
    sizes, seen = Sizes((10,), (SEQ_LEN,)), [[], [], []]
    whole = loader(datasets, sizes)
    for step in range(40):
        drawn = whole.drawn(step)
        counts = np.bincount(drawn.datasets, minlength=3)
        assert np.abs(sum(map(len, seen)) - step * 10) == 0
        for dataset in range(3):
            seen[dataset] += drawn.samples[drawn.datasets == dataset].tolist()
            assert abs(len(seen[dataset]) - (step + 1) * 10 * datasets[dataset].weight) <= 1.5, counts
    size = whole.num_samples[0]
    assert size == 999 // SEQ_LEN
    assert whole.epochs(40)[0] == pytest.approx(200 / size)
    in_order = []  # of the first dataset's draws, in the order of their numbers
    for step in range(40):
        drawn = whole.drawn(step)
        in_order += drawn.samples[drawn.datasets == 0].tolist()
    for step_end in (13,):
        first = sum((whole.drawn(s).datasets == 0).sum() for s in range(step_end))
        assert first >= size
    assert sorted(set(in_order[:first])) == list(range(size))


def test_records_made_elsewhere_stay_samples(tmp_path):
    tokens = token_file(tmp_path / "r", 1, num_tokens=170, record_length=17)
    assert (tokens.num_samples(16), tokens.num_samples(8)) == (10, 0)
    whole = Loader(
        [Dataset("r", tokens, 1.0, tokens.places_of(IGNORED), Stream(tokens, 16))], Sizes((10,), (16,)), 1, EOD, IGNORED
    )
    rows = sorted(map(tuple, whole.samples(0)))
    assert rows == sorted(map(tuple, tokens.tokens.reshape(10, 17).astype(int)))
    assert whole.batch(0).loss_weights.tobytes() == make_batch(whole.samples(0), EOD, IGNORED).loss_weights.tobytes()


def test_batches_are_made_ahead_and_in_any_order():
    made = []

    def make(step):
        made.append(step)
        if step == 7:
            raise ConfigError("step 7")
        return step * 10

    ahead = Prefetcher(make, end=10, ahead=2)
    assert [ahead.get(step) for step in (0, 1, 2)] == [0, 10, 20]
    assert ahead.get(9) == 90
    assert ahead.get(9) == 90
    assert ahead.get(12) == 120  # beyond the end it is made when asked for
    with pytest.raises(ConfigError, match="step 7"):
        ahead.get(7)
    assert set(made) <= {*range(5), 7, 8, 9, 12}


def test_a_blend_of_weights_or_by_temperature(tmp_path, write):
    token_file(tmp_path / "a", 1, 400)
    token_file(tmp_path / "b", 2, 100)
    by_weight = read_blend(write("w.yaml", "datasets:\n- {path: a, weight: 3}\n- {path: b, weight: 1}\n"))
    assert [(part.name, part.weight) for part in by_weight] == [("a", 0.75), ("b", 0.25)]
    by_size = read_blend(write("t.yaml", "datasets: [{path: a}, {path: b}]\ntemperature: 2\n"))
    assert [part.weight for part in by_size] == pytest.approx([2 / 3, 1 / 3])
    assert read_blend(tmp_path / "a")[0].weight == 1
    told = read_blend(write("d.yaml", "datasets: [{path: a, domain: 1}, {path: b}]\ntemperature: 1\n"))
    assert [part.domain for part in told] == [1, None]
    assert "100 tokens give no sequence of 128" in short_datasets(by_size, 128)[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: []", "needs `datasets`, a list"),
        ("datasets: [", "w.yaml:1: not YAML"),
        ("datasets: [{path: a, weight: 0}]", r"datasets\[0\].weight must be above 0, got 0"),
        ("datasets: [{path: a, wieght: 1}]", r"datasets\[0\].wieght is unknown; did you mean weight\?"),
        ("datasets: [{path: a}]\ntemperature: -1", "temperature must be above 0"),
        ("datasets: [{path: a, weight: 1}]\ntemperature: 2", "choose one"),
        ("datasets: [{path: a, weight: 1}, {path: a, weight: 2}]", "a is named twice"),
        ("datasets: [{path: none, weight: 1}]", "w.yaml: .*none: no token files there"),
        ("datasets: [{weight: 1}]", r"datasets\[0\] needs a path"),
        ("datasets: [{path: a, weight: 1, domain: -1}]", r"datasets\[0\].domain must be at least 0"),
        ("datasets: [{path: a, weight: 1}, {path: b, weight: 1}]", "b was made with another tokenizer than a"),
    ],
)
def test_each_mistake_in_a_blend_is_named(tmp_path, write, text, message):
    token_file(tmp_path / "a", 1)
    token_file(tmp_path / "b", 2, tokenizer="another")
    with pytest.raises(ConfigError, match=message):
        read_blend(write("w.yaml", text))
