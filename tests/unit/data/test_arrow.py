# SPDX-License-Identifier: Apache-2.0
"""Datasets that Hugging Face datasets saved are read row after row."""

import json

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.documents import read_documents
from sporeloom.data.sources import DocumentSource

pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
TEXTS = [f"text number {number} " * (number % 7 + 1) for number in range(50)]


def stream(path, texts, size=7):
    """An Arrow stream, as datasets writes it, in record batches of some rows."""
    table = pyarrow.table({"n": list(range(len(texts))), "text": texts})
    path.parent.mkdir(parents=True, exist_ok=True)
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=size)
    return path


def saved(folder, texts=TEXTS):
    """A folder as `save_to_disk` makes it."""
    stream(folder / "data-00000-of-00002.arrow", texts[:20])
    stream(folder / "data-00001-of-00002.arrow", texts[20:])
    for name in ("state.json", "dataset_info.json"):
        (folder / name).write_text(json.dumps({"description": "no text"}))
    return folder


def documents(*paths, **flags):
    source = DocumentSource(paths, **flags)
    return [document for batch in source.batches() for _, document in source.parse(batch).documents]


def test_a_saved_dataset_is_its_rows_in_order(tmp_path):
    folder = saved(tmp_path / "set")
    found = documents(folder)
    assert [document.text for document in found] == TEXTS
    assert found[20].place == f"{folder / 'data-00001-of-00002.arrow'}:1"
    assert read_documents(folder) == TEXTS  # what `train --data` reads


def test_datasets_itself_saves_such_a_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "set", num_shards=3)
    assert [document.text for document in documents(tmp_path / "set")] == TEXTS


def test_shards_hold_each_row_once(tmp_path):
    source = DocumentSource((saved(tmp_path / "set"),), shard_mb=0.0001)
    shards = source.shards()
    assert len(shards) == 2
    batches = [batch for number, files in enumerate(shards) for batch in source.batches_of(number, files)]
    assert [document.text for batch in batches for _, document in source.parse(batch).documents] == TEXTS


def test_a_file_with_random_access_is_read_too(tmp_path):
    path, table = tmp_path / "a.arrow", pyarrow.table({"body": TEXTS})
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    assert [document.text for document in documents(path, key="body")] == TEXTS


def test_several_splits_are_refused_by_name(tmp_path):
    saved(tmp_path / "set" / "train")
    saved(tmp_path / "set" / "test")
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match="holds the splits test, train of a dataset; name one"):
        DocumentSource((tmp_path / "set",)).files()


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"no arrow file, but a text of some length")
    with pytest.raises(ConfigError, match=r"a\.arrow: not an Arrow file"):
        documents(tmp_path / "a.arrow")
    path = stream(tmp_path / "b.arrow", TEXTS)
    with pytest.raises(ConfigError, match="no column `body`; it has: n, text"):
        documents(path, key="body")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    source, problems, texts = DocumentSource((path,), on_error="skip"), [], []
    for batch in source.batches():
        parsed = source.parse(batch)
        problems += parsed.problems
        texts += [document.text for _, document in parsed.documents]
    assert texts == TEXTS[: len(texts)] and len(texts) % 7 == 0 and 0 < len(texts) < 50
    assert problems == [f"{path}:{len(texts) + 1}: {problems[0].partition(': ')[2]}"] and "damaged" in problems[0]


def test_other_json_files_of_a_folder_are_texts_as_before(tmp_path):
    (tmp_path / "state.json").write_text('{"a": 1}')
    (tmp_path / "a.txt").write_text("a text")
    assert [document.text for document in documents(tmp_path)] == ["a text", '{"a": 1}']
