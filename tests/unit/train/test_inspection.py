# SPDX-License-Identifier: Apache-2.0
"""What `preprocess inspect` says of a row is read from the files at the bytes that it names."""

from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TWO_LAYERS

from sporeloom.core.errors import ConfigError
from sporeloom.data.token_file import TokenFile
from sporeloom.train.inspection import InspectConfig, describe, inspect

TEXT = ROOT / "examples" / "small_town.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("inspected")


def config(folder, **flags):
    flags = {"seq_len": 32, "batch_size": 4, "steps": 6, **flags}
    return InspectConfig(data=TEXT, config=TWO_LAYERS, output_dir=folder, **flags)


@pytest.mark.parametrize("packing", ["stream", "shuffled", "best-fit"])
@pytest.mark.parametrize("step", [1, 5])
def test_the_bytes_and_documents_of_a_row_are_its_tokens(folder, packing, step):
    found = inspect(config(folder, packing=packing, step=step, rows=(0, 1, 2, 3)))
    assert len(found["rows"]) == 4
    for row in found["rows"]:
        file = TokenFile(Path(row["file"]).parent)
        raw = np.fromfile(row["file"], file.tokens.dtype)
        width = raw.itemsize
        tokens = [*row["tokens"], row["labels"][-1]]
        of_bytes, of_documents = [], []
        for part in row["documents"]:
            begin, end = (place // width for place in part["bytes"])
            of_bytes += raw[begin:end].tolist()
            document = [*file.document(part["document"]).tolist(), file.info.eod_id]
            of_documents += document[slice(*part["tokens"])]
        assert of_bytes == of_documents == tokens[: len(of_bytes)]
        assert set(tokens[len(of_bytes) :]) <= {file.info.eod_id}  # padding
        assert packing == "best-fit" or len(of_bytes) == 33


def test_parts_of_a_growing_length_are_parts_of_their_sample(folder):
    flags = {"seq_len_growth": ("16:2",), "batch_size": 2, "rows": (0, 1)}
    first, second = inspect(config(folder, step=1, **flags))["rows"]
    begins, ends = ([row["documents"][place]["bytes"][place] for row in (first, second)] for place in (0, -1))
    assert first["sample"] == second["sample"] and (first["part"], second["part"]) == (0, 1)
    assert begins[1] == begins[0] + 16 * 2 and ends[0] == begins[1] + 2  # they share a token: a label, then an input


def test_the_text_names_files_documents_and_bytes(folder):
    found = inspect(config(folder, step=2, rows=(1,)))
    part = found["rows"][0]["documents"][0]
    said = describe(found, as_tokens=False)
    assert f"document {part['document']}, tokens {part['tokens'][0]} to {part['tokens'][1] - 1}: " in said
    assert f"tokens.bin, bytes {part['bytes'][0]} to {part['bytes'][1] - 1}" in said


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_a_text_is_found_in_every_row_that_has_it(folder, packing):
    texts = {}
    for step in range(1, 7):
        found = inspect(config(folder, packing=packing, step=step, rows=(0, 1, 2, 3)))
        texts |= {(step, row["row"]): row["text"] for row in found["rows"]}
    some = texts[3, 2][3:6]
    assert len(some) == 3 and "<" not in some
    wanted = [place for place, text in texts.items() if some in text]
    found = inspect(config(folder, packing=packing, find=some))
    assert [(match["step"], match["row"]) for match in found["matches"]] == wanted
    said = describe(found, as_tokens=False)
    assert f"step {wanted[0][0]}, row {wanted[0][1]}, of {TEXT}" in said


def test_a_text_is_found_as_the_tokenizer_has_it(folder):
    assert "，" in TEXT.read_text() and "，" not in inspect(config(folder))["rows"][0]["text"]
    found = inspect(config(folder, find="小城在山脚下，一条河"))
    assert found["matches"] and found == {**inspect(config(folder, find="小城在山脚下,一条河")), "find": found["find"]}


def test_tokens_after_the_last_end_are_of_a_document_that_has_none(folder):
    file = TokenFile(Path(inspect(config(folder))["rows"][0]["file"]).parent)
    count, total = file.info.num_documents, file.info.num_tokens
    file.ends = file.ends[:-1]
    begin = int(file.ends[-1])
    found = list(file.documents_in(begin - 1, total))
    last = begin - int(file.ends[-2])
    assert found == [(count - 2, last - 1, last), (count - 1, 0, total - begin)]


def test_a_text_that_is_nowhere_is_found_nowhere(folder):
    found = inspect(config(folder, find="no such text in the town"))
    assert describe(found, as_tokens=False) == "0 rows contain 'no such text in the town', of the steps 1 to 6"


def test_an_empty_text_is_refused(folder):
    with pytest.raises(ConfigError, match="--find: an empty text"):
        inspect(config(folder, find=""))
