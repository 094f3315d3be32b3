# SPDX-License-Identifier: Apache-2.0
"""`--tracker` as a user gives it, with a package that only notes what it is told."""

import json

import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, tool

TEXT = ROOT / "examples" / "small_town.txt"
PACKAGE = """
import json, pathlib

class Run:
    def __init__(self, **told):
        self.path = pathlib.Path(told["dir"]) / "told.jsonl"
        self.note(init=told)
    def note(self, **what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + chr(10))
    def log(self, values, step):
        if step == 3:
            raise ConnectionError("the server is gone")
        self.note(step=step, loss=values["loss"])
    def finish(self, exit_code):
        self.note(exit_code=exit_code)

init = Run
"""

pytestmark = pytest.mark.slow


def test_one_rank_reports_and_a_failure_of_the_tracker_ends_nothing(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(PACKAGE)
    script, out = tmp_path / "train_with_tracker.py", tmp_path / "out"
    script.write_text("from sporeloom.cli.train import main\n")  # whose folder is one of packages
    outcome = tool(
        *(script, "--data", TEXT, "--config", TWO_LAYERS, "--seq-len", 32, "--steps", 4),
        *("--strategy", CONFIGS / "pangu_tiny_dp2.yaml", "--output-dir", out),
        *("--tracker", "wandb", "--run-name", "town", "--project", "small"),
        processes=2,
    )
    assert outcome.code == 0, outcome.output
    first, *others = [json.loads(line) for line in (out / "told.jsonl").read_text().splitlines()]
    assert (first["init"]["project"], first["init"]["name"]) == ("small", "town")
    assert first["init"]["config"]["train"]["steps"] == 4
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert others == [*({"step": n, "loss": lines[n - 1]["loss"]} for n in (1, 2)), {"exit_code": 1}]
    assert outcome.output.count("wandb: the server is gone; the run continues without it") == 1
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert list((out / "tensorboard" / "town").iterdir())
