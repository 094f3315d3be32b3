# SPDX-License-Identifier: Apache-2.0
"""tools/preprocess.py as users start it, and training on what it writes."""

import json
import os
import shutil

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, fewer_microbatches, in_process, run, tool

from sporeloom.data.curriculum import DifficultyIndex
from sporeloom.data.token_file import TokenFile

TEXT = ROOT / "examples" / "small_town.txt"

PARAGRAPHS = [part for part in TEXT.read_text(encoding="utf-8").split("\n\n") if part.strip()]

pytestmark = pytest.mark.slow


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def preprocess(*arguments, start=tool):
    return start("tools/preprocess.py", *arguments)


@pytest.fixture(scope="module")
def blend(checkpoint, tmp_path_factory):
    """A file that blends two token folders of one tokenizer."""
    folder = tmp_path_factory.mktemp("blend")
    for name, part in (("a", PARAGRAPHS[::2]), ("b", PARAGRAPHS[1::2])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part), encoding="utf-8"
        )
        outcome = preprocess(
            *(
                "tokenize",
                folder / f"{name}.jsonl",
                "--tokenizer",
                checkpoint / "tokenizer.model",
                "--out",
                folder / name,
            )
        )
        assert outcome.code == 0, outcome.output
        assert json.loads(outcome.output)["documents"] == len(part)
    (folder / "blend.yaml").write_text("datasets:\n- {path: a, weight: 0.7}\n- {path: b, weight: 0.3}\n")
    return folder / "blend.yaml"


def test_a_blend_with_growing_batches_resumes_on_another_mesh_as_on_one_device(blend, write, tmp_path):
    grow = ("--batch-size", 16, "--batch-size-ramp", 8, 8, 16, "--seq-len", 32, "--seq-len-growth", "16:2")
    small = write("small.json", '{"num_layers": 2, "hidden_size": 64}')
    arguments = ("tools/train.py", "--data", blend, "--config", small, *grow, "--dropout", 0.1, "--adam-epsilon", 1e-5)
    saved = ("--steps", 5, "--save-every", 1, "--output-dir")
    outcome = tool(*arguments, *saved, tmp_path / "one")
    assert outcome.code == 0, outcome.output
    assert "compiled for 8 sequences of 16" in outcome.output
    assert "compiled for 16 sequences of 32" in outcome.output
    assert "a 70.0%" in outcome.output
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    for step in (2, 3, 4, 5):
        shutil.rmtree(tmp_path / "many" / "checkpoints" / f"step-{step:08d}")
    mesh = fewer_microbatches(CONFIGS / "pangu_tiny_dp2_pp2_zero.yaml", tmp_path)
    outcome = tool(*arguments, *saved, tmp_path / "many", "--strategy", mesh, "--resume", processes=4)
    assert outcome.code == 0, outcome.output
    np.testing.assert_allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=1e-5)


def test_a_resumed_run_must_read_the_same_data(blend, tmp_path):
    arguments = ("tools/train.py", "--seq-len", 32, "--steps", 2, "--save-every", 1, "--output-dir", tmp_path / "out")
    assert tool(*arguments, "--data", blend).code == 0
    for change, message in (
        (("--data", blend.parent / "a"), "data datasets was"),
        (("--data", blend, "--seed", 2), "data seed was 1, is 2"),
        (("--data", blend, "--batch-size", 16, "--batch-size-ramp", 8, 8, 16), "data batch_size_ramp was []"),
    ):
        outcome = tool(*arguments[:4], 4, *arguments[5:], *change, "--resume")
        assert outcome.code == 2
        assert message in outcome.output


def test_inspect_shows_what_a_step_reads(blend, tmp_path):
    arguments = ("inspect", "--data", blend, "--seq-len", 32, "--output-dir", tmp_path, "--step", 3)
    outcome = preprocess(*arguments, "--rows", 0, 5, "--json")
    assert outcome.code == 0, outcome.output
    found = json.loads(outcome.output)
    assert [part["samples"] for part in found["blend"]] == [17, 7]
    assert (found["sequences"], found["tokens_before"], [row["row"] for row in found["rows"]]) == (8, 512, [0, 5])
    row = found["rows"][1]
    assert len(row["tokens"]) == len(row["positions"]) == row["trained"] == 32
    assert row["labels"][:-1] == row["tokens"][1:]
    assert preprocess(*arguments).output.startswith("step 3: 8 sequences of 32 tokens, after 512 tokens")
    table = preprocess(*arguments, "--tokens").output
    assert "loss weight" in table
    assert "error: --rows 8: step 3 has rows 0 to 7" in preprocess(*arguments, "--rows", 8).output


def test_texts_of_several_domains_train_their_own_experts(blend, write, tmp_path):
    experts = {"num_experts": 4, "experts_per_token": 1, "router": "hash", "num_domains": 2}  # nothing is dropped
    config = write("sigma.json", json.dumps({"num_layers": 2, "hidden_size": 64, "experts": experts}))
    told = (blend.parent / "domains.yaml", blend.parent / "second.yaml", blend.parent / "third.yaml")
    for path, text in zip(
        told,
        ("[{path: a, domain: 0}, {path: b, domain: 1}]", "[{path: b, domain: 1}]", "[{path: b, domain: 2}]"),
        strict=True,
    ):
        path.write_text(f"datasets: {text}\ntemperature: 1\n")
    flags = ("--config", config, "--dropout", 0, "--seq-len", 32, "--batch-size", 4)
    outcome = tool("tools/train.py", "--data", told[0], *flags, "--steps", 3, "--output-dir", tmp_path / "run")
    assert outcome.code == 0, outcome.output
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < last["busiest_expert"] <= 4

    model = tmp_path / "run" / "checkpoint"  # the loss of texts of the second domain is what scoring them there gives
    still = (*flags, "--from-checkpoint", model, "--learning-rate", 0, "--steps", 1)
    for name, data in (("second", told[1]), ("first", blend.parent / "b")):
        assert tool("tools/train.py", "--data", data, *still, "--output-dir", tmp_path / name).code == 0
    inspected = preprocess(
        "inspect", "--data", told[1], *flags, "--output-dir", tmp_path / "look", "--rows", 0, 1, 2, 3, "--json"
    )
    rows = json.loads(inspected.output)["rows"]
    ids = np.array([[*row["tokens"], row["labels"][-1]] for row in rows])
    np.save(tmp_path / "ids.npy", ids)
    score = ("tools/score.py", "--checkpoint", model, "--ids", tmp_path / "ids.npy", "--eod-id", 9)
    for name, domain in (("second", 1), ("first", 0)):
        outcome = tool(*score, "--domain", domain)
        found = json.loads(outcome.output[outcome.output.index("{") : outcome.output.rindex("}") + 1])
        assert losses(tmp_path / name)[0] == pytest.approx(found["loss"], rel=1e-5)
    assert losses(tmp_path / "first") != losses(tmp_path / "second")

    outcome = in_process("tools/train.py", "--data", told[2], *flags, "--steps", 1, "--output-dir", tmp_path / "no")
    assert outcome.code == 2 and "b, domain 2: this model has 2 domains, counted from 0" in outcome.output
    outcome = in_process("tools/train.py", "--data", told[1], "--steps", 1, "--output-dir", tmp_path / "no")
    assert "domain 1: the experts of this model have no domains" in outcome.output
    generate = ("tools/generate.py", "--prompt", "A", "--checkpoint")
    assert "--domain 2: this model has 2 domains" in in_process(*generate, model, "--domain", 2).output
    assert tool(*generate, model, "--domain", 1, "--max-new-tokens", 2).code == 0


def test_the_steps_from_raw_text_to_tokens(checkpoint, tmp_path):
    raw, test, clean = tmp_path / "raw.jsonl", tmp_path / "test.txt", tmp_path / "clean.jsonl"
    raw.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*PARAGRAPHS, PARAGRAPHS[0], "short"]), encoding="utf-8"
    )
    test.write_text(PARAGRAPHS[3], encoding="utf-8")
    steps = (
        ("filter", raw, "--out", tmp_path / "long.jsonl", "--min-chars", 10),
        ("dedup", tmp_path / "long.jsonl", "--out", tmp_path / "unique"),
        ("decontaminate", tmp_path / "unique" / "long.jsonl", "--evaluation", test, "--out", clean),
        ("tokenize", clean, "--tokenizer", checkpoint / "tokenizer.model", "--out", tmp_path / "tokens"),
    )
    reports = []
    for step, start in zip(steps, (tool, tool, tool, run), strict=True):
        outcome = preprocess(*step, start=start)
        assert outcome.code == 0, outcome.output
        reports.append(json.loads(outcome.output[outcome.output.index("{") : outcome.output.rindex("}") + 1]))
    assert reports[0]["removed"] == 1
    assert reports[1]["exact"] == 1
    assert reports[2]["dropped"] >= 1
    assert reports[3]["documents"] == len(clean.read_text(encoding="utf-8").splitlines())


def test_the_losses_of_a_curriculum_are_those_that_training_tells(blend, checkpoint, tmp_path):
    tokens, index = blend.parent / "a", tmp_path / "losses.npz"
    asked = ("--metric", "loss", "--checkpoint", checkpoint, "--seq-len", 32, "--out", index)
    outcome = preprocess("difficulty", tokens, *asked)
    assert outcome.code == 0, outcome.output
    values = DifficultyIndex.read(index).values
    file = TokenFile(tokens)
    inputs = np.stack([file.tokens[i * 32 : i * 32 + 32] for i in range(len(values))])
    ignored = json.loads((checkpoint / "config.json").read_text())["loss_ignore_id"]
    trained = (inputs != ignored).sum(1)
    curriculum = tmp_path / "easy.yaml"
    schedule = (
        "schedule_config: {total_curriculum_step: 1000, difficulty_step: 50}"  # the easier half in the first step
    )
    curriculum.write_text(f"index: losses.npz\nschedule_type: fixed_linear\nmin_difficulty: 50\n{schedule}\n")
    still = ("--from-checkpoint", checkpoint, "--learning-rate", 0, "--dropout", 0, "--seq-len", 32, "--steps", 1)
    easy = np.argsort(values, kind="stable")[: len(values) // 2]
    for name, flags, samples in (("all", (), np.arange(len(values))), ("easy", ("--curriculum", curriculum), easy)):
        out = tmp_path / name
        words = ("--data", tokens, "--batch-size", len(samples), *still, *flags, "--output-dir", out)
        outcome = tool("tools/train.py", *words)
        assert outcome.code == 0, outcome.output
        expected = (values[samples] * trained[samples]).sum() / trained[samples].sum()
        assert losses(out) == [pytest.approx(expected, rel=1e-5)]


def test_mindrecord_there_and_back(blend, checkpoint, tmp_path):
    records, tokenizer = tmp_path / "a.mindrecord", checkpoint / "tokenizer.model"
    outcome = preprocess("to-mindrecord", blend.parent / "a", records, "--seq-len", 32)
    assert outcome.code == 0, outcome.output
    back = preprocess("from-mindrecord", records, "--tokenizer", tokenizer, "--out", tmp_path / "back")
    assert back.code == 0, back.output
    assert json.loads(back.output) == json.loads(outcome.output)
    tokens = np.fromfile(blend.parent / "a" / "tokens.bin", np.uint16)
    expected = np.lib.stride_tricks.sliding_window_view(tokens, 33)[::32]
    assert (np.fromfile(tmp_path / "back" / "tokens.bin", np.uint16).reshape(-1, 33) == expected).all()
    for data in (blend.parent / "a", tmp_path / "back"):
        arguments = ("tools/train.py", "--data", data, "--seq-len", 32, "--steps", 2, "--seed", 3)
        assert tool(*arguments, "--output-dir", tmp_path / data.name / "run").code == 0
    wrong = preprocess("from-mindrecord", tokenizer, "--tokenizer", tokenizer, "--out", tmp_path / "none")
    assert (wrong.code, "not a MindRecord file" in wrong.output) == (2, True)
    assert "records of 33 tokens; use --seq-len 32" in tool("tools/train.py", "--data", tmp_path / "back").output
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "none"))) == []


def test_files_of_megatron_there_and_back_and_a_run_that_resumes_on_them(blend, checkpoint, write, tmp_path):
    tokenizer, files = ("--tokenizer", checkpoint / "tokenizer.model"), tmp_path / "corpora"
    for name in "ab":
        outcome = preprocess("to-megatron", blend.parent / name, files / name)
        assert outcome.code == 0, outcome.output
    back = preprocess("from-megatron", files / "a", *tokenizer, "--out", tmp_path / "back")
    assert back.code == 0, back.output
    assert json.loads(back.output)["ends_added"] == 0
    for name in ("tokens.bin", "ends.bin"):
        assert (tmp_path / "back" / name).read_bytes() == (blend.parent / "a" / name).read_bytes()
    small = write("small.json", '{"num_layers": 2, "hidden_size": 64}')
    data = tmp_path / "megatron.yaml"
    data.write_text("format: megatron\ndata_path: [corpora/a, corpora/b]\nweights: [0.7, 0.3]\nnum_samples: 24\n")
    arguments = ("tools/train.py", "--data", data, "--config", small, "--seq-len", 32, "--batch-size", 4)
    assert "name no tokenizer" in tool(*arguments).output
    arguments += (*tokenizer, "--adam-epsilon", 1e-5, "--decay-steps", 4)
    rest = ("--save-every", 2, "--output-dir")
    outcome = tool(*arguments, "--steps", 4, *rest, tmp_path / "one")
    assert outcome.code == 0, outcome.output
    assert "samples 0 to 15 of 25 in Megatron-LM's order: corpora/a" in outcome.output
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    shutil.rmtree(tmp_path / "many" / "checkpoints" / "step-00000004")
    rest += (tmp_path / "many",)
    mesh = ("--strategy", CONFIGS / "pangu_tiny_dp2.yaml")
    outcome = tool(*arguments, "--steps", 4, *rest, *mesh, "--resume", processes=2)
    assert outcome.code == 0, outcome.output
    np.testing.assert_allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=1e-5)
    data.write_text(data.read_text().replace("0.7", "0.6"))
    assert "data megatron was" in tool(*arguments, "--steps", 5, *rest, "--resume").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tokenise",), "tokenise is unknown; did you mean tokenize?"),
        (("tokenize", "nowhere.jsonl", "--tokenizer", "none", "--out", "x"), "nowhere.jsonl: there is no such file"),
        (("tokenize", TEXT, "--tokenizer", "none", "--out", "x"), "none: there is no such tokenizer"),
        (("tokenize", TEXT, "--tokenizer", TEXT, "--out", "x"), "not a SentencePiece model"),
        (("tokenize", TEXT, "--out", "x"), "required: --tokenizer"),
        (("tokenize", TEXT, "--tokenizer", TEXT, "--out", "x", "--workers", 0), "--workers must be at least 1"),
        (
            ("tokenize", TEXT, "--tokenizer", TEXT, "--out", "x", "--fim-rate", 0.5),
            "needs --fim-tokens PREFIX SUFFIX MIDDLE",
        ),
        (
            ("tokenize", TEXT, "--tokenizer", TEXT, "--out", "x", "--fim-rate", 5),
            "--fim-rate must be in [0, 1], got 5.0",
        ),
        (("tokenize", TEXT, "--tokenizer", TEXT, "--out", ROOT), "is there already"),
        (("dedup", TEXT, "--out", "x", "--threshold", 8), "--threshold must be in (0, 1]"),
        (("filter", TEXT, "--out", "x.jsonl"), "no rule was given"),
        (("filter", TEXT, "--out", "x.txt", "--min-chars", 9), "end the name in .jsonl, .jsonl.gz, .jsonl.zst"),
        (("decontaminate", TEXT, "--evaluation", "none", "--out", "x.jsonl"), "none: there is no such file"),
        (("decontaminate", TEXT, "--evaluation", TEXT, "--out", "x.jsonl", "--ngram", 0), "--ngram must be at least 1"),
        (("to-mindrecord", "none", "x"), "none: no token files there"),
        (("to-megatron", "none", "x"), "none: no token files there"),
        (("from-megatron", "none", "--tokenizer", TEXT, "--out", "x"), "none.idx: there is no such file"),
        (("inspect", "--data", TEXT, "--step", 0), "--step must be at least 1"),
    ],
)
def test_a_mistake_gives_its_message_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    arguments = [tmp_path / a if a in ("x", "x.jsonl", "x.txt") else a for a in arguments]
    outcome = in_process("tools/preprocess.py", *arguments)
    assert (outcome.code, outcome.output.startswith("error: ")) == (2, True), outcome.output
    assert message in outcome.output
    assert not os.listdir(tmp_path)
