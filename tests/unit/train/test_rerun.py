# SPDX-License-Identifier: Apache-2.0
"""Steps that are run twice: the same run as without, and a bit that flips is found and named."""

import json
import re

import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, call, tool

pytestmark = pytest.mark.slow

COMMON = ("--data", ROOT / "examples/small_town.txt", "--config", TWO_LAYERS, "--seq-len", 32, "--steps", 3)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor-factored"])
def test_a_run_is_the_same_whether_its_steps_are_run_twice_or_not(tmp_path, optimizer):
    for name, more in (("once", ()), ("twice", ("--rerun-every", 2))):
        outcome = tool("tools/train.py", *COMMON, "--optimizer", optimizer, *more, "--output-dir", tmp_path / name)
        assert outcome.code == 0, outcome.output
    assert losses(tmp_path / "once") == losses(tmp_path / "twice")


def test_a_bit_that_flips_on_one_rank_is_named(tmp_path):
    words = [*COMMON, "--strategy", CONFIGS / "pangu_tiny_tp2_pp2.yaml", "--rerun-every", 2, "--batch-size", 8]
    told = call(
        "tests/unit/train/rerun_worker.py", "train_with_a_fault", *map(str, words), tmp_path / "out", processes=4
    )
    assert all(
        message.startswith("step 2, run twice from the same state, does not give the same bits: ") for message in told
    )
    assert re.search(r": rank 3: model\.\S+ is .*, then .*, at entry 0\. Nothing", told[3])
    assert all("on rank 3, whose log has the details" in message for message in told[:3])
