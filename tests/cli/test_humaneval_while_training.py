# SPDX-License-Identifier: Apache-2.0
"""HumanEval-X while training: pass@1 is that of `sporeloom evaluate humaneval-x`, and training is what it is without."""

import gzip
import json

import pytest
from conftest import CONFIGS, TWO_LAYERS, in_process, tool

TEXT = "The mill is near the river and a bridge, the bridge is near the market and a school. " * 40
FLAGS = (
    "--config",
    TWO_LAYERS,
    "--seq-len",
    64,
    "--batch-size",
    4,
    "--learning-rate",
    3e-3,
    "--warmup-steps",
    0,
    "--decay-steps",
    4,
)
SOLVED = "def one():\n    return 1\n    #"
"""A prompt that has the solution: whatever follows in its line is a comment."""
UNSOLVED = 'def two():\n    """Two."""\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    (folder / "text.txt").write_text(TEXT)
    problems = [
        {"task_id": f"Python/{place}", "prompt": prompt, "declaration": prompt, "canonical_solution": "", "test": test}
        for place, (prompt, test) in enumerate([(SOLVED, "assert one() == 1\n"), (UNSOLVED, "assert two() == 2\n")])
    ]
    with gzip.open(folder / "humaneval_python.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(problem) + "\n" for problem in problems))
    return folder


def trained(folder, out, *arguments, steps=2, processes=1):
    flags = ("--data", folder / "text.txt", *FLAGS, "--steps", steps, "--output-dir", out)
    outcome = tool("tools/train.py", *flags, *arguments, processes=processes)
    assert outcome.code == 0, outcome.output
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def evaluated(folder):
    return "--eval-humaneval-x", folder, "--eval-new-tokens", 4, "--eval-allow-execution"


@pytest.mark.slow
def test_pass_at_1_is_that_of_the_checkpoint_and_training_is_what_it_is_without(folder, tmp_path):
    found = trained(folder, tmp_path / "evaluated", *evaluated(folder), "--eval-every", 1)
    plain = trained(folder, tmp_path / "plain")
    assert [line["loss"] for line in found] == [line["loss"] for line in plain]
    files = [tmp_path / name / "checkpoint" / "model.safetensors" for name in ("evaluated", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [line.get("evaluation/humaneval-x/python/pass@1") for line in found] == [0.5, 0.5]
    done = tool(
        *("tools/evaluate.py", "humaneval-x", "--checkpoint", tmp_path / "evaluated" / "checkpoint", "--data", folder),
        *("--max-new-tokens", 4, "--allow-execution", "--output-dir", tmp_path / "scores"),
    )
    assert done.code == 0, done.output
    (score,) = json.loads((tmp_path / "scores" / "summary.json").read_text())
    assert score["pass_at"]["1"] == found[-1]["evaluation/humaneval-x/python/pass@1"]


@pytest.mark.slow
def test_a_mesh_has_the_scores_of_its_weights(folder, tmp_path):
    strategy = ("--strategy", CONFIGS / "pangu_tiny_dp2.yaml")
    found = trained(folder, tmp_path / "out", *evaluated(folder), *strategy, steps=1, processes=2)
    assert found[-1]["evaluation/humaneval-x/python/pass@1"] == 0.5


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--eval-languages", "rust"], "--eval-languages: there is nothing to evaluate; give --eval-tasks or"),
        (["--eval-humaneval-x", "nowhere"], "--eval-humaneval-x nowhere: there is no such folder"),
        (["--eval-humaneval-x", "."], "--eval-humaneval-x . runs programs that a model wrote: give --eval-allow-ex"),
    ],
)
def test_flags_that_say_nothing_are_refused(folder, tmp_path, flags, problem):
    outcome = in_process("tools/train.py", "--data", folder / "text.txt", "--output-dir", tmp_path / "out", *flags)
    assert outcome.code != 0
    assert problem in outcome.output


@pytest.mark.slow
def test_languages_that_are_unknown_or_have_no_toolchain_are_refused_before_the_first_step(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    for languages, problems in (
        (["rusty"], ["--eval-languages rusty is unknown; known: python, cpp, java, js, go, rust; did you mean rust?"]),
        (["python", "go", "rust"], ["--eval-languages go: no go", "--eval-languages rust: no cargo"]),
    ):
        flags = ("--data", folder / "text.txt", *FLAGS, "--steps", 1, "--output-dir", tmp_path / "out")
        outcome = in_process("tools/train.py", *flags, *evaluated(folder), "--eval-languages", *languages)
        assert outcome.code == 2 and "compiled" not in outcome.output
        assert all(problem in outcome.output for problem in problems), outcome.output
        assert not (tmp_path / "out" / "metrics.jsonl").exists()
