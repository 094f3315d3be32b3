# SPDX-License-Identifier: Apache-2.0
"""Near-duplicates against a brute-force oracle that shares no code with them."""

import json
from collections import Counter

import numpy as np
import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.dedup import dedup
from sporeloom.data.minhash import MinHash, jaccard, shingle_set
from sporeloom.data.sources import DocumentSource


def oracle_shingles(text):
    text = " ".join(text.lower().split())
    return {text[i : i + 5] for i in range(len(text) - 4)} or {text}


def oracle_similarity(a, b):
    return len(a & b) / len(a | b)


def oracle_similarities(sets):
    """Of all pairs that share anything."""
    holders, shared = {}, Counter()
    for number, shingles in enumerate(sets):
        for shingle in shingles:
            shared.update((other, number) for other in holders.setdefault(shingle, []))
            holders[shingle].append(number)
    return {(a, b): n / (len(sets[a]) + len(sets[b]) - n) for (a, b), n in shared.items()}


def oracle_removed(pairs):
    """All but the first of each connected group."""
    neighbours, removed, seen = {}, set(), set()
    for a, b in pairs:
        neighbours.setdefault(a, []).append(b)
        neighbours.setdefault(b, []).append(a)
    for start in sorted(neighbours):
        waiting = [start] * (start not in seen)
        seen.add(start)
        while waiting:
            for other in neighbours[waiting.pop()]:
                if other not in seen:
                    seen.add(other)
                    removed.add(other)
                    waiting.append(other)
    return removed


def planted(num_documents=3000, seed=0):
    """Random texts, Chinese and English; a third of them a neighbour with some characters replaced."""
    rng = np.random.default_rng(seed)
    texts = []
    for number in range(num_documents):
        if texts and number % 3 == 0:
            text = list(texts[-1])
            share = rng.uniform(0, 0.12)
            for place in np.flatnonzero(rng.random(len(text)) < share):
                text[place] = chr(rng.integers(0x4E00, 0x9000))
            texts.append("".join(text))
        else:
            low, high = ((0x4E00, 0x5200), (97, 123))[rng.integers(2)]
            texts.append("".join(map(chr, rng.integers(low, high, rng.integers(100, 300)))))
    return texts


def write_lines(path, texts):
    path.write_text(
        "".join(json.dumps({"text": t, "id": i}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)),
        encoding="utf-8",
    )
    return path


def test_recall_and_precision_against_brute_force(tmp_path):
    texts = planted()
    source = write_lines(tmp_path / "a.jsonl", texts)
    report = dedup(DocumentSource((source,)), tmp_path / "out", MinHash(0.8), workers=0)
    kept = {json.loads(line)["id"] for line in (tmp_path / "out" / "a.jsonl").open(encoding="utf-8")}
    similarity = oracle_similarities([oracle_shingles(text) for text in texts])
    assert sum(0.5 < value < 0.8 for value in similarity.values()) > 200
    expected = oracle_removed([pair for pair, value in similarity.items() if value >= 0.8])
    assert len(expected) > 200
    removed = set(range(len(texts))) - kept
    assert len(removed & expected) / len(expected) >= 0.95
    assert len(removed & expected) / len(removed) >= 0.95
    assert report["documents"] == len(kept) + report["exact"] + report["near"] == len(texts)


def test_similarities_are_exact():
    texts = planted(60, seed=3)
    for a, b in zip(texts[2::3], texts[3::3], strict=False):
        expected = oracle_similarity(oracle_shingles(a), oracle_shingles(b))
        assert jaccard(shingle_set(a, 5), shingle_set(b, 5)) == pytest.approx(expected, abs=1e-6)
    assert jaccard(shingle_set("ab", 5), shingle_set("AB ", 5)) == 1
    assert jaccard(shingle_set("ab", 5), shingle_set("abc", 5)) == 0


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_banding_finds_pairs_at_the_threshold(threshold):
    minhash = MinHash(threshold)
    assert minhash.bands * minhash.rows <= 128
    rng, found = np.random.default_rng(1), 0
    for _ in range(200):  # sets of characters as texts of one-character shingles
        letters = rng.permutation(np.arange(0x4E00, 0x4E00 + 2000))
        shared = round(200 * threshold)
        rest = (200 - shared) // 2
        a = "".join(map(chr, letters[: shared + rest]))
        b = "".join(map(chr, [*letters[:shared], *letters[shared + rest : 200]]))
        keys = MinHash(threshold, shingle=1).band_keys([a, b])
        found += (keys[0] == keys[1]).any()
    assert found >= 0.95 * 200


def test_signatures_do_not_depend_on_the_batch():
    texts, minhash = ["", "a", *planted(30)], MinHash(0.8)
    whole = minhash.band_keys(texts)
    assert whole.shape == (32, minhash.bands)
    alone = np.concatenate([minhash.band_keys([text]) for text in texts])
    assert (whole == alone).all()


def test_the_best_dataset_keeps_its_copy(tmp_path):
    one, two = "first text " * 20, "another thing " * 20
    good = write_lines(tmp_path / "good.jsonl", ["unique " * 30, one])
    bad = write_lines(tmp_path / "bad.jsonl", [one, two, one + "!", "own " * 40])
    for order, kept in (((good, bad), ([0, 1], [1, 3])), ((bad, good), ([0, 1, 3], [0]))):
        out = tmp_path / order[0].stem
        report = dedup(DocumentSource(order), out, MinHash(0.8), workers=1)
        found = [[json.loads(line)["id"] for line in (out / path.name).open(encoding="utf-8")] for path in order]
        assert found == list(kept)
        assert report["datasets"][str(order[0])]["kept"] == len(kept[0])
        assert (report["exact"], report["near"]) == (1, 1)
        notes = [json.loads(line) for line in (out / "duplicates.jsonl").open(encoding="utf-8")]
        assert all(note["kept"] == f"{order[0]}:{2 if order[0] == good else 1}" for note in notes)
    assert not list(tmp_path.rglob(".dedup*"))


def test_groups_are_connected_components(tmp_path):
    base = [chr(0x4E00 + i) for i in range(300)]
    chain = []
    for step in range(6):  # neighbours are alike, the ends are not
        text = list(base)
        text[: step * 12] = ["x"] * (step * 12)
        chain.append("".join(text))
    sets = [oracle_shingles(text) for text in chain]
    assert oracle_similarity(sets[0], sets[-1]) < 0.8 < min(map(oracle_similarity, sets, sets[1:]))
    dedup(DocumentSource((write_lines(tmp_path / "a.jsonl", chain),)), tmp_path / "out", MinHash(0.8), workers=0)
    assert len((tmp_path / "out" / "a.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_mistakes_leave_nothing(tmp_path, write):
    good, broken = write("a.jsonl", '{"text": "x"}\n'), write("b.jsonl", '{"text": 1}\n')
    other = write("sub/a.jsonl", '{"text": "y"}\n')
    for inputs, message in (
        ((good, broken), "b.jsonl:1: no `text` field"),
        ((good, other), "two inputs would be written to one file"),
        ((tmp_path / "none.jsonl",), "no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            dedup(DocumentSource(inputs), tmp_path / "out", MinHash(0.8), workers=0)
        assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
