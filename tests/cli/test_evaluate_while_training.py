# SPDX-License-Identifier: Apache-2.0
"""Benchmarks while training: scores are those of `sporeloom evaluate lm-eval`, and training is what it is without."""

import importlib.util
import json
from pathlib import Path

import pytest
from conftest import CONFIGS, TWO_LAYERS, call, in_process, tool

from sporeloom.checkpoint.manifest import read_manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"),
]
TEXT = "The mill is near the river and a bridge, the bridge is near the market and a school. " * 40
FLAGS = ("--config", TWO_LAYERS, "--seq-len", 64, "--learning-rate", 3e-3, "--warmup-steps", 0, "--decay-steps", 4)
TASK = Path(__file__).with_name("town_task.yaml").read_text(encoding="utf-8")
LINES = [
    {"question": "The mill is near the", "choices": ["river", "zebra"], "answer": 0},
    {"question": "the bridge is near the", "choices": ["zoo and a", "market and a"], "answer": 1},
    {"question": "The mill is near the river and a", "choices": ["bridge", "mill"], "answer": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "text.txt").write_text(TEXT)
    (folder / "town.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "town.yaml").write_text(TASK.replace("DATA", str(folder / "town.jsonl")))
    return folder


def trained(folder, out, *arguments, processes=1):
    outcome = tool(
        *("tools/train.py", "--data", folder / "text.txt", *FLAGS, "--steps", 3, "--output-dir", out),
        *arguments,
        processes=processes,
    )
    assert outcome.code == 0, outcome.output
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_scores_are_those_of_the_checkpoint_and_training_is_what_it_is_without(folder, tmp_path):
    found = trained(folder, tmp_path / "evaluated", "--eval-tasks", folder / "town.yaml", "--eval-every", 2)
    plain = trained(folder, tmp_path / "plain")
    assert [line["loss"] for line in found] == [line["loss"] for line in plain]
    files = [tmp_path / name / "checkpoint" / "model.safetensors" for name in ("evaluated", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert ["evaluation/town/acc" in line for line in found] == [False, True, True]
    out = tmp_path / "scores.json"
    done = tool(
        *("tools/evaluate.py", "lm-eval", "--checkpoint", tmp_path / "evaluated" / "checkpoint"),
        *("--tasks", folder / "town.yaml", "--output", out),
    )
    assert done.code == 0, done.output
    scores = json.loads(out.read_text())["results"]["town"]
    assert found[-1]["evaluation/town/acc"] == scores["acc,none"]
    assert found[-1]["evaluation/town/acc_stderr"] == scores["acc_stderr,none"]


def test_a_mesh_has_the_scores_of_its_weights(folder, tmp_path):
    strategy = ("--strategy", CONFIGS / "pangu_tiny_dp2.yaml")
    found = trained(folder, tmp_path / "out", "--eval-tasks", folder / "town.yaml", *strategy, processes=2)
    assert 0 <= found[-1]["evaluation/town/acc"] <= 1
    assert "evaluation/town/acc" not in found[0]


def test_an_evaluation_that_fails_saves_the_run_first(folder, tmp_path):
    strategy, out = ("--strategy", CONFIGS / "pangu_tiny_dp2.yaml"), tmp_path / "out"
    flags = ("--data", folder / "text.txt", *FLAGS, "--steps", 2, "--output-dir", out, *strategy)
    arguments = [str(flag) for flag in (*flags, "--eval-tasks", folder / "town.yaml")]
    found = call("tests/cli/failing_evaluation_worker.py", "run", arguments, processes=2)
    assert set(found) == {"the benchmark has no answer"}
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert read_manifest(out / "checkpoints" / "step-00000002").step == 2
    outcome = tool("tools/train.py", *flags, "--resume", processes=2)  # which only writes the model
    assert outcome.code == 0 and (out / "checkpoint").is_dir(), outcome.output


def test_data_that_cannot_be_loaded_end_a_run_before_its_first_step(folder, tmp_path):
    (tmp_path / "gone.yaml").write_text(TASK.replace("DATA", str(tmp_path / "gone.jsonl")))
    outcome = in_process(
        *("tools/train.py", "--data", folder / "text.txt", *FLAGS, "--steps", 1, "--output-dir", tmp_path / "out"),
        *("--eval-tasks", tmp_path / "gone.yaml"),
    )
    assert outcome.code == 2, outcome.output
    assert f"--eval-tasks {tmp_path / 'gone.yaml'}: " in outcome.output
    assert "compiled" not in outcome.output
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--eval-every", "2"],
            "--eval-every: there is nothing to evaluate; give --eval-tasks or --eval-humaneval-x, too",
        ),
        (["--eval-tasks", "none.yaml"], "--eval-tasks none.yaml: there is no such file"),
        (
            ["--eval-tasks", "x", "--eval-include-path", "nowhere"],
            "--eval-include-path nowhere: there is no such folder",
        ),
    ],
)
def test_flags_that_say_nothing_are_refused(folder, tmp_path, flags, problem):
    outcome = in_process("tools/train.py", "--data", folder / "text.txt", "--output-dir", tmp_path / "out", *flags)
    assert outcome.code != 0
    assert problem in outcome.output
