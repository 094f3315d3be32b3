# SPDX-License-Identifier: Apache-2.0
"""Repeated substrings against a brute-force oracle that shares no code with them."""

import json
import random

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.sources import DocumentSource
from sporeloom.data.substrings import MAX_POSITIONS, SubstringSettings, dedup_substrings


def oracle(texts, length):
    """Every character in a run of `length` that began earlier, somewhere."""
    seen, kept = set(), []
    for text in texts:
        gone = set()
        for i in range(len(text) - length + 1):
            window = text[i : i + length]
            gone |= set(range(i, i + length)) if window in seen else set()
            seen.add(window)
        kept.append("".join(character for i, character in enumerate(text) if i not in gone))
    return kept


def cut(tmp_path, texts, workers=0, **settings):
    source, out = tmp_path / "in.jsonl", tmp_path / f"out-{workers}.jsonl"
    source.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    report = tmp_path / f"cuts-{workers}.jsonl"
    counts = dedup_substrings(DocumentSource((source,)), out, SubstringSettings(**settings), workers, report)
    lines = list(map(json.loads, out.read_text().splitlines()))
    return counts, {line["id"]: line["text"] for line in lines}, list(map(json.loads, report.read_text().splitlines()))


def pieces(seed, count, letters):
    rng = random.Random(seed)
    stock = ["".join(rng.choices(letters, k=rng.randint(5, 90))) for _ in range(30)]
    texts = []
    for _ in range(count):
        own = ["".join(rng.choices(letters, k=rng.randint(1, 120))) for _ in range(rng.randint(0, 3))]
        parts = [*own, *rng.choices(stock, k=rng.randint(0, 4))]
        rng.shuffle(parts)
        texts.append("".join(parts) or "x")
    return texts


@pytest.mark.parametrize("length", [8, 9, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("letters", ["abcdefghijklmnopqrstuvwxyz", "ab", "床前明月光疑是地上霜"])
def test_what_is_left_is_what_the_oracle_leaves(tmp_path, length, letters):
    texts = pieces(length, 80, letters)
    counts, kept, cuts = cut(tmp_path, texts, min_length=length, min_rest=1)
    expected = {i: text for i, text in enumerate(oracle(texts, length)) if text}
    assert kept == expected
    assert counts["characters_removed"] == sum(map(len, texts)) - sum(map(len, expected.values()))
    assert counts.get("whole", 0) + counts.get("cut", 0) + counts.get("dropped", 0) == counts["documents"] == len(texts)
    for note in cuts:
        line = int(note["place"].rpartition(":")[2])
        assert texts[line - 1][note["start"] : note["end"]] == note["text"]


def test_nothing_is_removed_where_nothing_is_repeated(tmp_path):
    texts = [f"{i} {chr(97 + i % 26) * 3}" for i in range(50)]
    counts, kept, cuts = cut(tmp_path, texts, min_length=20)
    assert (list(kept.values()), cuts, counts["whole"]) == (texts, [], 50)


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path):
    texts = [*pieces(7, 4000, "abcdefgh"), "word " * 5_000, *pieces(8, 2000, "abcdefgh")]  # several batches
    alone = cut(tmp_path, texts, workers=0, min_length=40)
    shared = cut(tmp_path, texts, workers=2, min_length=40)
    assert alone == shared
    assert alone[0]["characters_removed"] > 200_000


def test_a_window_that_is_everywhere_is_compared_with_its_first_places(tmp_path):
    line = "All rights reserved by whoever wrote this, and nobody else may copy it anywhere at all. "
    texts = [f"{line}{i} {i * i} {i**3}" for i in range(3 * MAX_POSITIONS)]
    _, kept, _ = cut(tmp_path, texts, min_length=50, min_rest=0)
    assert kept[0] == texts[0]
    assert all(len(text) < 30 for i, text in kept.items() if i)


def test_what_is_left_too_short_is_dropped_and_counted(tmp_path):
    long = "".join(random.Random(1).choices("abcdefghij ", k=400))
    counts, kept, _ = cut(tmp_path, [long, f"{long} and little more", f"{long} and {'much ' * 20}"], min_length=100)
    assert list(kept) == [0, 2]
    assert (counts["whole"], counts["cut"], counts["dropped"]) == (1, 1, 1)


def test_nothing_is_left_behind_after_a_mistake(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "fine"}\nnot json\n')
    with pytest.raises(ConfigError, match=r"in\.jsonl:2"):
        dedup_substrings(DocumentSource((tmp_path / "in.jsonl",)), tmp_path / "o.jsonl", SubstringSettings(), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
