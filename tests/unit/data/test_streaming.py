# SPDX-License-Identifier: Apache-2.0
"""Text that is tokenized while training: the stream that `preprocess tokenize` makes, and the same steps from anywhere."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.loader import rows_of_rank
from sporeloom.data.sample_order import Sizes
from sporeloom.data.streaming import Cursor, StreamedText, StreamLoader, TokenStream
from sporeloom.tasks.pretraining import Pretraining
from sporeloom.train.plain_text import TrainConfig

MODEL = SimpleNamespace(num_mtp_layers=0, dropout_rate=0.0)
TEXTS = [f"{'town ' * (i % 7)}number {i}" if i % 11 else "  " for i in range(90)]
EOD = 255


class Bytes:
    """A token for each byte."""

    eod_id, vocab_size = EOD, 256

    def encode_document(self, text):
        return list(text.encode())


def stream_of(texts):
    return np.concatenate([[*text.encode(), EOD] for text in texts if text.strip()])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same rows as Parquet shards with several groups, a dataset of `save_to_disk`, one in the cache's form, lines."""
    root = tmp_path_factory.mktemp("data")
    (root / "parquet").mkdir()
    for number, part in enumerate((TEXTS[:50], TEXTS[50:])):
        table = pyarrow.table({"id": list(range(len(part))), "text": part})
        pyarrow.parquet.write_table(table, root / "parquet" / f"train-{number:05d}-of-00002.parquet", row_group_size=7)
    dataset = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    dataset.save_to_disk(root / "saved", num_shards=3)
    (root / "cache").mkdir()
    for name, rows in (("news-train", TEXTS), ("news-test", ["other"]), ("cache-0123", ["other"])):
        with datasets.arrow_writer.ArrowWriter(
            path=str(root / "cache" / f"{name}.arrow"), writer_batch_size=16
        ) as writer:
            for text in rows:
                writer.write({"text": text})
            writer.finalize()
    datasets.Dataset.from_dict({"text": TEXTS}).to_json(root / "lines.jsonl")
    return root


SOURCES = [("parquet", None), ("saved", None), ("cache", "train"), ("lines.jsonl", None)]


def loader(folders, name="parquet", split=None, block=8, rows=np.arange, batch=4, length=16, seed=3):
    text, ids = StreamedText(folders / name, split=split), {"eod_id": EOD, "loss_ignore_id": EOD}
    return StreamLoader(text, Bytes(), "tokenizer", Sizes((batch,), (length,)), seed, block, rows, **ids)


@pytest.mark.parametrize(("name", "split"), SOURCES)
def test_the_stream_repeats_all_documents_and_goes_on_from_every_position(folders, name, split):
    text, expected = StreamedText(folders / name, split=split), np.tile(stream_of(TEXTS), 4)
    stream, position = TokenStream(text, Bytes(), Cursor()), 0
    for count in (1, 5, 37, 400, 1, 2000, 13, 2):
        np.testing.assert_array_equal(stream.take(count), expected[position : position + count])
        stream.advance(count)
        position += count
        again = TokenStream(text, Bytes(), stream.cursor)
        np.testing.assert_array_equal(again.take(300), expected[position : position + 300])
    assert stream.cursor.epoch == 1


def test_a_block_has_each_of_its_windows_once(folders):
    made, expected = loader(folders), np.tile(stream_of(TEXTS), 2)
    found = np.concatenate([made.samples(step) for step in range(4)])
    windows = np.stack([expected[i * 16 : i * 16 + 17] for i in range(16)])
    for block in (0, 1):
        part = found[block * 8 : block * 8 + 8]
        assert sorted(map(tuple, part)) == sorted(map(tuple, windows[block * 8 : block * 8 + 8]))
        assert not np.array_equal(part, windows[block * 8 : block * 8 + 8])
    assert not np.array_equal(loader(folders, seed=4).samples(0), found[:4])


@pytest.mark.parametrize("block", [1, 3, 8, 64])
def test_a_step_is_the_same_from_anywhere_and_on_every_rank(folders, block):
    straight = loader(folders, block=block)
    steps = [straight.batch(step) for step in range(40)]
    assert max(cursor.epoch for cursor in straight.cursors.values()) >= 1
    resumed = loader(folders, block=block)
    state = straight.state(25)
    assert len(str(state)) < 100
    resumed.restore(state)
    assert len(resumed.cursors) == 1 + (block <= 25 * 4)
    for step in (25, 26, 39, 7, 25):  # also back, as after a spike
        for one, other in zip(resumed.batch(step), steps[step], strict=True):
            np.testing.assert_array_equal(one, other)
    for rank in range(2):
        rows = rows_of_rank(2, rank, 1)
        part = loader(folders, block=block, rows=rows).batch(5)
        for one, other in zip(part, steps[5], strict=True):
            np.testing.assert_array_equal(one[rows(4)], other[rows(4)])
            assert not np.any(np.delete(one, rows(4), axis=0))


def test_only_what_a_block_needs_is_in_memory(folders, monkeypatch):
    """Rows that lie behind a position are not decoded, nor are those far ahead."""
    made = loader(folders, "parquet", block=2, batch=2)
    seen = []
    monkeypatch.setattr(Bytes, "encode_document", lambda self, text: seen.append(text) or list(text.encode()))
    made.samples(0)
    assert 1 <= len(seen) < 10
    resumed = loader(folders, "parquet", block=2, batch=2)
    made.samples(20)
    resumed.restore(made.state(20))
    seen.clear()
    resumed.samples(20)
    assert TEXTS[1] not in seen
    assert len(seen) < 10


def test_compiling_reads_no_text(folders, monkeypatch):
    made = loader(folders)
    real = made.batch(0)
    monkeypatch.setattr(StreamLoader, "samples", lambda *_: pytest.fail("text was read"))
    task = Pretraining(SimpleNamespace(random_ltd=None, lora=None, model=MODEL, sizes=made.sizes), None)
    task.loader = made
    shaped = task.shaped_inputs(0)
    assert [(array.shape, array.dtype) for array in shaped] == [(array.shape, array.dtype) for array in real]
    assert not any(array.any() for array in shaped)


def test_two_threads_get_the_samples_of_one(folders):
    expected = [loader(folders).samples(step) for step in range(0, 40, 5)]
    for _ in range(3):
        made = loader(folders)
        with ThreadPoolExecutor(2) as threads:
            found = [
                threads.submit(lambda made=made: [made.samples(step) for step in range(0, 40, 5)]) for _ in range(2)
            ]
            for future in found:
                np.testing.assert_array_equal(future.result(60), expected)


def test_a_state_drops_the_positions_before_it(folders):
    made = loader(folders, block=1)
    expected = [made.samples(step) for step in range(30)]
    before = made.state(20)
    assert min(block for block in made.cursors if block) == 80
    assert made.state(20) == before
    np.testing.assert_array_equal(made.samples(3), expected[3])


@pytest.mark.parametrize("told", [{"key": "body"}, {"split": "train"}, {"shuffle_block": 64}])
def test_flags_of_streaming_are_refused_without_it(tmp_path, told):
    (tmp_path / "a.txt").write_text("text")
    config = TrainConfig(data=tmp_path / "a.txt", **told)
    flag = f"--{next(iter(told))}".replace("_", "-")
    assert f"{flag}: is read with --streaming alone; give it, too" in list(config.problems())


def test_problems_name_columns_and_splits(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"no column `body`; it has: id, text; choose one with --key"):
        StreamedText(folders / "parquet", "body")
    with pytest.raises(ConfigError, match=r"holds the splits test, train; choose one with --split test"):
        StreamedText(folders / "cache")
    with pytest.raises(ConfigError, match=r"--split dev: no file of .* there are: news-test.arrow, news-train.arrow"):
        StreamedText(folders / "cache", split="dev")
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match=r"bad.parquet: not a Parquet file"):
        StreamedText(tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"text": [" ", ""]}), tmp_path / "bad.parquet")
    with pytest.raises(ConfigError, match="contains no text in `text`"):
        loader(tmp_path, "bad.parquet").samples(0)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "bad.parquet")
    with pytest.raises(ConfigError, match=r"bad.parquet:2: no `text` field with a string"):
        loader(tmp_path, "bad.parquet").samples(0)
    for blocks in ({"x": [0, 0, 0, 0]}, {"1": [0, 9, 0, 0]}, {"1": [0, 0, 0]}, {"1": [0, 0, 0, -1]}):
        with pytest.raises((ValueError, TypeError)):
            loader(folders).restore({"blocks": blocks})
