# SPDX-License-Identifier: Apache-2.0
"""What is cut: every planted n-gram, and nothing else."""

import json
import re
from functools import partial
from random import Random

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.decontaminate import (
    DecontaminationSettings,
    EvaluationSet,
    make_decontaminator,
    pieces,
    read_evaluation,
)
from sporeloom.data.rewrite import rewrite
from sporeloom.data.sources import DocumentSource

NO_MARGIN = DecontaminationSettings(margin=0, min_piece=0)
WORDS = [f"w{i}" for i in range(400)]


def words_of(text):
    """The oracle's own idea of words: these texts hold nothing but ASCII and single ideographs."""
    return [(m.start(), m.end(), m.group().lower()) for m in re.finditer(r"[A-Za-z0-9_]+|[\u4e00-\u9fff]", text)]


def oracle(text, evaluation, n):
    """Characters that are in a run of n words which an evaluation text has, too."""
    grams = {tuple(w for *_, w in words_of(e)[i : i + n]) for e in evaluation for i in range(len(words_of(e)) - n + 1)}
    words, covered = words_of(text), set()
    for i in range(len(words) - n + 1):
        if tuple(w for *_, w in words[i : i + n]) in grams:
            covered.update(range(words[i][0], words[i + n - 1][1]))
    return covered


def test_every_planted_run_is_found_and_nothing_else_is_cut():
    random = Random(0)
    for case in range(150):
        n = random.choice([3, 5, 13])
        vocabulary = [*WORDS[: random.choice([6, 40, 400])], "\u4e2d", "\u6587", "The", "the"]

        def text(length, vocabulary=vocabulary):
            return "".join(
                random.choice(vocabulary) + random.choice([" ", " ", ", ", "\n", " -- "]) for _ in range(length)
            )

        evaluation = [text(random.randrange(1, 40)) for _ in range(5)]
        parts = [text(random.randrange(0, 60))]
        for planted in random.sample(evaluation, random.randrange(4)):
            words = [w for *_, w in words_of(planted)]
            parts += [
                " ".join(w.upper() for w in words) if random.random() < 0.5 else planted,
                text(random.randrange(0, 60)),
            ]
        document = " ".join(parts)
        cuts = EvaluationSet([(f"e:{i}", e) for i, e in enumerate(evaluation)], n).cuts(
            document, DecontaminationSettings(n, 0, 0, 10**6)
        )
        found = set()
        for cut in cuts:
            found.update(range(cut.start, cut.end))
        expected = oracle(document, evaluation, n)
        assert expected <= found, case
        spaces = {i for i in found - expected if not document[i].isalnum()}  # between two matches that touch
        assert found - expected == spaces, case


def test_a_document_is_split_around_a_match_as_published():
    evaluation = " ".join(WORDS[:13])
    before, after = "a" * 150 + " " + "b" * 350, "c" * 500
    text = f"{before} {evaluation} {after}"
    (cut,) = EvaluationSet([("e:1", evaluation)], 13).cuts(text, DecontaminationSettings())
    start, end = text.index("w0"), text.index("w12") + 3
    assert (cut.start, cut.end, cut.match, cut.source) == (start - 200, end + 200, evaluation, "e:1")
    assert pieces(text, [cut], DecontaminationSettings()) == [text[: start - 200], text[end + 200 :]]
    assert pieces(text, [cut], DecontaminationSettings(min_piece=303)) == []
    many = " ".join([evaluation, "x" * 700] * 12)
    assert (
        pieces(
            many,
            EvaluationSet([("e:1", evaluation)], 13).cuts(many, DecontaminationSettings()),
            DecontaminationSettings(),
        )
        == []
    )
    cuts = EvaluationSet([("e:1", evaluation)], 13).cuts(many, DecontaminationSettings(max_pieces=12))
    assert len(pieces(many, cuts, DecontaminationSettings(max_pieces=12))) == 12


def test_twelve_words_are_not_a_match():
    found = EvaluationSet([("e:1", " ".join(WORDS[:13])), ("e:2", " ".join(WORDS[50:60]))], 13)
    assert not found.cuts(" ".join([*WORDS[:12], "other", *WORDS[1:13], "other", *WORDS[50:60]]), NO_MARGIN)
    assert found.num_short == 1


def test_the_field_that_numbers_pieces_does_not_take_the_place_of_the_text(write):
    source = DocumentSource((write("train.jsonl", '{"piece": "a text"}\n'),), key="piece")
    with pytest.raises(ConfigError, match="--key piece: pieces of a document are numbered in a field of that name"):
        make_decontaminator(source, (write("test.jsonl", "{}\n"),), ("text",), DecontaminationSettings())


def test_files_are_rewritten_and_every_cut_reported(tmp_path, write):
    leaked = " ".join(WORDS[:20])
    write(
        "train.jsonl",
        "".join(
            json.dumps({"text": t, "id": i}) + "\n"
            for i, t in enumerate(["clean", f"{'x' * 600} {leaked} {'y' * 900}"])
        ),
    )
    tests = write("test.jsonl", json.dumps({"prompt": leaked, "answer": "short"}) + "\n")
    source = DocumentSource((tmp_path / "train.jsonl",))
    make = partial(make_decontaminator, source, (tests,), ("prompt", "answer"), DecontaminationSettings())
    report = rewrite(source, tmp_path / "out.jsonl.gz", make, 1, tmp_path / "cuts.jsonl")
    out = DocumentSource((tmp_path / "out.jsonl.gz",))
    found = [document.record for batch in out.batches() for _, document in out.parse(batch).documents]
    assert [(d["id"], d.get("piece"), len(d["text"])) for d in found] == [(0, None, 5), (1, 0, 401), (1, 1, 701)]
    (note,) = map(json.loads, (tmp_path / "cuts.jsonl").read_text().splitlines())
    assert (note["place"], note["match"], note["evaluation"]) == (
        f"{tmp_path}/train.jsonl:2",
        " ".join(WORDS[:13]),
        f"{tests}:1",
    )
    assert (report["clean"], report["cut"], report["matches"], report["pieces"]) == (1, 1, 1, 2)
    with pytest.raises(ConfigError, match="no document has 13 words"):
        read_evaluation((tests,), ("answer",), 13)
    with pytest.raises(ConfigError, match="is there already"):
        rewrite(source, tmp_path / "out.jsonl.gz", make, 1)
