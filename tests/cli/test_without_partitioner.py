# SPDX-License-Identifier: Apache-2.0
"""On a MindSpore that has no partitioner of its own, CPU processes train and generate as on one that has."""

import json
import os

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, run, tool

TEXT = ROOT / "examples" / "small_town.txt"
TRAIN = ("tools/train.py", "--data", TEXT, "--config", TWO_LAYERS, "--seq-len", 32, "--steps", 2, "--batch-size", 4)
WITHOUT = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "without_partitioner"), str(ROOT)])}
SAID = "has no partitioner of its own (cannot import name"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "out"
    outcome = tool(*TRAIN, "--output-dir", out)
    assert outcome.code == 0, outcome.output
    return out


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().split("\n") if line]


def tokens(output):
    return [json.loads(line)["tokens"] for line in output.split("\n") if line.startswith("{")]


def launched(out, strategy, *arguments):
    tokenizer = out / "checkpoint" / "tokenizer.model"
    return run(*TRAIN, "--tokenizer", tokenizer, "--strategy", strategy, "--launch", *arguments, env=WITHOUT)


def test_training_equals_one_device(one_device, write, tmp_path):
    strategy = write("zero.yaml", f"mesh: {{dp: 2}}\nrules: {CONFIGS}/rules/decoder.yaml\noptimizer_parallel: {{}}\n")
    outcome = launched(one_device, strategy, "--output-dir", tmp_path / "out")
    assert outcome.code == 0, outcome.output
    np.testing.assert_allclose(losses(tmp_path / "out"), losses(one_device), rtol=1e-5)


@pytest.mark.long
def test_generation_equals_one_device(one_device):
    words = (
        "tools/generate.py",
        "--checkpoint",
        one_device / "checkpoint",
        "--prompt",
        "the",
        "--max-new-tokens",
        2,
        "--json",
    )
    alone = tool(*words)
    assert alone.code == 0, alone.output
    outcome = run(*words, "--strategy", CONFIGS / "pangu_tiny_tp2.yaml", "--launch", env=WITHOUT)
    assert outcome.code == 0, outcome.output
    assert tokens(outcome.output) == tokens(alone.output) != []


NEEDS_IT = """\
import mindspore as ms
from mindspore import nn
from sporeloom.parallel.parallelize import parallelize
from sporeloom.strategy.loader import strategy_of

ms.set_device("CPU")
parallelize(nn.Dense(4, 4), strategy_of({"mesh": {"dp": 2}, "engine": "mindspore"}))
"""


def test_what_needs_it_says_so(write):
    outcome = run(write("script.py", NEEDS_IT), env=WITHOUT)
    assert outcome.code != 0
    assert "engine" in outcome.output and SAID in outcome.output


def test_dry_runs_do_not_need_it():
    asked = ("--config", TWO_LAYERS, "--strategy", CONFIGS / "pangu_tiny_tp2.yaml", "--ranks", "0")
    outcome = run("tools/dry_run.py", *asked, env=WITHOUT)
    assert outcome.code == 0, outcome.output
    assert "AllReduce forward" in outcome.output
