# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's files and its order of samples, compared element for element with what Megatron-Core makes."""

import json

import numpy as np
import pytest
from conftest import shared

from sporeloom.core.errors import ConfigError
from sporeloom.data.indexed_file import DTYPES, HEADER, IndexedFile, bin_path, idx_path, token_dtype, write_indexed
from sporeloom.data.loader import rows_of_rank
from sporeloom.data.megatron import MegatronLoader, read_megatron
from sporeloom.data.megatron_order import (
    PARTS,
    SURPLUS,
    CorpusOrder,
    OrderSettings,
    blend_by_weights,
    blend_exhaustively,
    gpt_sample,
    normalized,
    samples_asked,
    split_ranges,
)
from sporeloom.data.sample_order import Sizes

CORPORA = ("small_u16", "other_i32", "with_modes_i32")


@pytest.fixture(scope="module")
def case():
    folder = shared("golden_v3/megatron_dataset/case_a")
    return folder, json.loads((folder / "config.json").read_text()), dict(np.load(folder / "golden.npz"))


def order_of(order, file):
    part = split_ranges(order["split"], len(file.lengths))[order["part"]]
    is_valid = PARTS[order["part"]] == "valid"
    settings = OrderSettings(
        order["sequence_length"],
        order["random_seed"],
        order["num_samples"],
        order.get("add_extra_token_to_sequence", True),
        order.get("drop_last_partial_validation_sequence", True) or not is_valid,
    )
    return part, CorpusOrder(file.lengths, part, settings)


@pytest.mark.parametrize("corpus", CORPORA)
def test_files_are_read_as_megatron_wrote_them_and_written_byte_for_byte(case, corpus, tmp_path):
    folder, _, golden = case
    file = IndexedFile(folder / corpus)
    for name in ("lengths", "pointers", "document_indices"):
        np.testing.assert_array_equal(getattr(file, name), golden[f"{corpus}.{name}"])
    tokens = np.concatenate([file.document(n) for n in range(len(file.document_indices) - 1)])
    np.testing.assert_array_equal(tokens, golden[f"{corpus}.tokens"])
    modes = golden.get(f"{corpus}.modes")
    np.testing.assert_array_equal(file.modes, modes) if modes is not None else None
    assert (file.text_problem() or "").count("multimodal") == (modes is not None)
    ends = file.document_indices
    documents = [
        [file.sequence(i) for i in range(a, b)] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    assert write_indexed(tmp_path / corpus, documents, file.dtype.name, modes) == len(file.lengths)
    for path in (bin_path, idx_path):
        assert path(tmp_path / corpus).read_bytes() == path(folder / corpus).read_bytes()


def test_orders_and_samples_equal_megatron_cores(case):
    folder, config, golden = case
    for order in config["orders"]:
        name, file = order["name"], IndexedFile(folder / order["corpus"])
        part, found = order_of(order, file)
        assert (found.epochs, found.separate_final_epoch, len(found)) == (
            order["epochs"],
            order["separate_final_epoch"],
            order["samples"],
        ), name
        np.testing.assert_array_equal(part, golden[f"{name}.part_sequences"])
        for index in ("document_index", "sample_index", "shuffle_index"):
            expected = golden[f"{name}.{index}"]
            assert getattr(found, index).dtype == expected.dtype
            np.testing.assert_array_equal(getattr(found, index), expected, f"{name}.{index}")
        text = np.stack([found.text(file, number, config["pad"]) for number in range(len(found))])
        np.testing.assert_array_equal(text, golden[f"{name}.text"])
        flags = [order.get(key, False) for key in ("reset_position_ids", "eod_mask_loss")]
        sample = gpt_sample(
            text, config["eod"], order.get("add_extra_token_to_sequence", True), *flags, pad=config["pad"]
        )
        for key, value in sample._asdict().items():
            assert value.dtype == golden[f"{name}.{key}"].dtype
            np.testing.assert_array_equal(value, golden[f"{name}.{key}"], f"{name}.{key}")


def test_blends_equal_megatron_cores(case):
    _, config, golden = case
    for number, blend in enumerate(config["blends"]):
        weights, size = normalized(blend["weights"]), blend["size"]
        assert weights == blend["normalised_weights"]
        assert samples_asked(size, weights) == blend["samples_asked_per_dataset"]
        assert samples_asked(size, weights, SURPLUS) == blend["samples_built_per_dataset"]
        assert sum(samples_asked(size, weights)) == blend["size_built"]
        found = blend_by_weights(weights, size)
        for key, value in found._asdict().items():
            np.testing.assert_array_equal(value, golden[f"blend_{number}.{key}"])
    for key, value in blend_exhaustively(config["exhaustive_blend_sizes"])._asdict().items():
        np.testing.assert_array_equal(value, golden[f"exhaustive_blend.{key}"])


def plain_sample_index(sizes, document_index, length, extra, count):
    """The published loop, one document after the other."""
    index, document, offset = [(0, 0)], 0, 0
    for _ in range(count):
        remaining = length + extra
        while remaining:
            size = sizes[document_index[document]] - offset
            remaining -= size
            if remaining <= 0:
                offset += remaining + size - extra
                remaining = 0
            elif document == len(document_index) - 1:
                offset = sizes[document_index[document]] - extra
                break
            else:
                document, offset = document + 1, 0
        index.append((document, offset))
    return index


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_the_sample_index_equals_the_published_loop(extra, drop):
    rng = np.random.default_rng(3)
    for trial in range(60):
        lengths = rng.integers(0, 9, rng.integers(1, 12)).astype(np.int32)
        lengths[0] += 12
        settings = OrderSettings(
            int(rng.integers(1, 12)), trial, None if trial % 3 == 0 else int(rng.integers(1, 40)), extra, drop
        )
        found = CorpusOrder(lengths, range(len(lengths)), settings)
        expected = plain_sample_index(
            lengths.tolist(), found.document_index.tolist(), settings.sequence_length, int(extra), len(found)
        )
        assert found.sample_index.tolist() == [list(pair) for pair in expected], (trial, lengths)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_dtype_of_the_format_returns_what_was_written(dtype, tmp_path):
    documents = [[[1, 2, 3], []], [], [[100]]]
    write_indexed(tmp_path / "corpus", documents, dtype)
    file = IndexedFile(tmp_path / "corpus")
    assert file.dtype.name == dtype and file.num_tokens == 4
    assert [file.document(n).tolist() for n in range(3)] == [[1, 2, 3], [], [100]]
    assert bool(file.text_problem()) == dtype.startswith("float")


def test_what_cannot_be_read_or_written_is_refused(tmp_path):
    prefix = tmp_path / "corpus"
    with pytest.raises(ConfigError, match=r"corpus\.idx: there is no such file"):
        IndexedFile(prefix)
    with pytest.raises(ConfigError, match="token 300 does not fit into uint8"):
        write_indexed(prefix, [[[300]]], "uint8")
    with pytest.raises(ConfigError, match="dtype bfloat16 is unknown"):
        write_indexed(prefix, [[[3]]], "bfloat16")
    with pytest.raises(ConfigError, match="2 modes for 1 sequences"):
        write_indexed(prefix, [[[3]]], "uint8", [0, 1])
    write_indexed(prefix, [[[3, 4]], [[5]]], "int32")
    good = idx_path(prefix).read_bytes()
    for data, message in (
        (b"something else entirely, of some length", "does not begin with MMIDIDX"),
        (good[:9] + b"\x02" + good[10:], "version 2; this program reads version 1"),
        (good[:17] + b"\x09" + good[18:], "dtype code 9 is unknown"),
        (good[:-4], f"has {len(good) - 4} bytes"),
        (good[:-8] + b"\x01" + good[-7:], "do not cover sequences 0 to 2 in order"),
        (good[: HEADER.size] + b"\xff" * 4 + good[HEADER.size + 4 :], "a negative length"),
    ):
        idx_path(prefix).write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            IndexedFile(prefix)
    idx_path(prefix).write_bytes(good)
    bin_path(prefix).write_bytes(b"\x00" * 8)
    with pytest.raises(ConfigError, match="has 8 bytes, its index needs 12"):
        IndexedFile(prefix)


def test_orders_that_are_impossible_are_refused():
    with pytest.raises(ConfigError, match="give up to three weights"):
        split_ranges("none", 10)
    assert split_ranges("0,1,0", 10) == [None, range(10), None]
    with pytest.raises(ConfigError, match="has no tokens"):
        CorpusOrder(np.array([5], np.int32), [], OrderSettings(4, 1, 3))
    assert [token_dtype(size) for size in (65499, 65500)] == ["uint16", "int32"]


def megatron_file(folder, corpora=CORPORA[:2], **settings):
    source = shared("golden_v3/megatron_dataset/case_a")
    lines = [f"data_path: [{', '.join(str(source / name) for name in corpora)}]"]
    path = folder / "megatron.yaml"
    path.write_text("\n".join(["format: megatron", *lines, *(f"{key}: {value}" for key, value in settings.items())]))
    return path


def loader_of(path, seq_len=12, batch_size=5, steps=10, rows=np.arange, **kwargs):
    return MegatronLoader(read_megatron(path), Sizes((batch_size,), (seq_len,)), steps, 3, 1000, rows, **kwargs)


def test_batches_follow_the_blended_data_set_through_every_step(case, tmp_path):
    _, config, golden = case
    blended = config["blended"]
    weights = blended["weights"]
    loader = loader_of(megatron_file(tmp_path, weights=weights, split='"1"', seed=blended["random_seed"]))
    assert [order.settings.num_samples for order in loader.orders] == blended["samples_built_per_dataset"]
    texts = golden["blended.text"].reshape(10, 5, 13)
    for step in range(10):
        batch = loader.batch(step)
        np.testing.assert_array_equal(batch.tokens, texts[step, :, :-1])
        np.testing.assert_array_equal(batch.labels, texts[step, :, 1:])
        np.testing.assert_array_equal(batch.positions, np.tile(np.arange(12), (5, 1)))
        np.testing.assert_allclose(batch.loss_weights, 1 / 60, rtol=1e-6)


def test_a_run_continues_after_the_samples_that_were_consumed(case, tmp_path):
    settings = {"weights": [3, 7], "split": '"1"', "seed": 77, "num_samples": 50}
    whole = loader_of(megatron_file(tmp_path, **settings))
    rest = loader_of(megatron_file(tmp_path, **settings, consumed_samples=20), steps=6)
    for step in range(6):
        for one, other in zip(whole.batch(step + 4), rest.batch(step), strict=True):
            np.testing.assert_array_equal(one, other)
    assert (rest.first_token(0), rest.first_token(6)) == (20 * 12, 50 * 12)
    with pytest.raises(ConfigError, match="need samples up to number 55, the data set has 50"):
        loader_of(megatron_file(tmp_path, **settings, consumed_samples=20), steps=7)


def test_ranks_read_their_rows_and_weigh_the_global_batch(case, tmp_path):
    path = megatron_file(
        tmp_path, CORPORA[:1], eod_mask_loss="true", reset_position_ids="true", reset_attention_mask="true", split="1"
    )
    whole = loader_of(path, batch_size=4).batch(2)
    assert whole.loss_weights.sum() == pytest.approx(1, abs=1e-4) and (whole.loss_weights == 0).any()
    assert (whole.positions[:, 1:][whole.tokens[:, :-1] == 3] == 0).all()
    parts = [loader_of(path, batch_size=4, rows=rows_of_rank(2, rank, 1)).batch(2) for rank in range(2)]
    for full, *mine in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(full, mine[0] + mine[1])
    ramped = MegatronLoader(read_megatron(path), Sizes((2, 2, 4), (12,)), 5, 3, 1000)
    assert [ramped.first_sample(step) for step in range(5)] == [0, 2, 4, 8, 12]


def test_without_weights_corpora_are_blended_by_their_sizes(case, tmp_path):
    loader = loader_of(megatron_file(tmp_path, split='"1"', num_samples=1000), steps=2)
    sizes = [len(order) for order in loader.orders]
    assert loader.size == sum(sizes) and all(order.epochs == 1 for order in loader.orders)
    np.testing.assert_array_equal(np.bincount(loader.blend.dataset_index), sizes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reset_position_ids": "true"}, "positions and attention restart together here"),
        ({"weights": "[1, 2, 3]"}, "weights has 3 entries for 2 corpora"),
        ({"shuffle": "true"}, "shuffle is unknown"),
        ({"split": "none"}, "give up to three weights"),
        ({"seed": "0.5"}, "seed must be"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_by_key(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        read_megatron(megatron_file(tmp_path, **settings))


def test_corpora_without_tokens_of_a_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"with_modes_i32\.idx: multimodal"):
        read_megatron(megatron_file(tmp_path, CORPORA))
    with pytest.raises(ConfigError, match="this part of the corpus has no tokens"):
        loader_of(megatron_file(tmp_path, weights="[1, 2]", split='"1"', part="test"))
    small = MegatronLoader(
        read_megatron(megatron_file(tmp_path, CORPORA[:1], split='"1"')), Sizes((2,), (12,)), 1, 3, 50
    )
    with pytest.raises(ConfigError, match=r"outside 0 \.\. 49, the model's vocabulary"):
        small.batch(0)
