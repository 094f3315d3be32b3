# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from conftest import CONFIGS, ROOT, in_process, run, shared, tool

ASCEND = CONFIGS / "clusters" / "ascend910b.yaml"
PANGU = ("--model", "pangu", "--size", "13b", "--cluster", ASCEND, "--devices", 64, "--global-batch-size", 512)
LLAMA = ROOT / "examples" / "llama3_8b_dimensions.yaml"


def plan(*arguments):
    return in_process("tools/plan.py", *arguments)


def test_a_plan_shows_options_and_why_they_lose(tmp_path):
    out = tmp_path / "plan.yaml"
    outcome = plan(*PANGU, "--top", 3, "--out", out)
    assert outcome.code == 0, outcome.output
    assert "12.80 G parameters on 64 ascend910b" in outcome.output
    lines = [line for line in outcome.output.splitlines() if line[:3].strip().isdigit()]
    assert len(lines) == 3
    assert outcome.output.count("%: ") == 2  # the losers' reasons
    # The verb reads it as it is: nothing is wrong but the number of processes
    flags = out.read_text().splitlines()[1].partition(" -- train ")[2].split()
    trained = tool(
        *("tools/train.py", "--model", "pangu", "--size", "13b", "--strategy", out, *flags),
        *("--data", ROOT / "examples" / "small_town.txt"),
    )
    assert trained.code == 2
    assert trained.output.count("error: ") == 1
    assert "1 process was launched" in trained.output


def test_json_and_a_model_by_its_dimensions_alone():
    cluster = CONFIGS / "clusters" / "h100.yaml"
    outcome = plan(
        *("--config", LLAMA, "--cluster", cluster, "--devices", 64),
        *("--global-batch-size", 256, "--json", "--interleave"),
    )
    assert outcome.code == 0, outcome.output
    options = json.loads(outcome.output)
    assert options[0]["why_slower"] is None
    assert all(option["why_slower"] for option in options[1:])
    assert options[0]["step_time_s"] == pytest.approx(
        sum(seconds for name, seconds in options[0]["seconds"].items() if name != "communication")
    )
    assert options[0]["strategy"]["flash_attention"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", 0), "--devices must be at least 1, got 0"),
        (("--global-batch-size", -1), "--global-batch-size must be at least 1, got -1"),
        (("--devices", 3, "--global-batch-size", 1), "no dp x tp x pp = 3 divides the model"),
        (("--devices", 1, "--global-batch-size", 8), "nothing fits: the nearest"),
        (("--size", "14b"), "14b"),
        (("--seq-len", 4096), "beyond the model's longest context, 1024"),
        (("--top", 0), "--top must be at least 1"),
        (("--config", "dims.yaml"), "give either --model and --size, --model FOLDER, or --config FILE"),
        (("--devices", 6, "--global-batch-size", 6, "--out", "plan.yaml"), "a multiple of 8 devices"),
        (("--cluster", "no_such.yaml"), "no_such.yaml: cannot be read"),
        (("--devicess", 3), "did you mean --devices?"),
    ],
)
def test_mistakes_are_clear_and_exit_with_2(arguments, words):
    outcome = plan(*PANGU, *arguments)
    assert outcome.code == 2, outcome.output
    assert words in outcome.output
    assert "Traceback" not in outcome.output


def test_validate_as_text_and_json():
    runs = shared("facts/published_runs.csv")
    text = plan("validate", runs)
    assert text.code == 0
    assert "not predicted:" in text.output
    report = json.loads(plan("validate", runs, "--json").output)
    assert set(report) >= {"step_time", "memory", "fits"}
    assert {"rows", "median_abs_error", "p90_abs_error", "by_source", "by_chip"} <= set(report["step_time"])


def test_validate_refuses_other_files(write):
    outcome = plan("validate", write("runs.csv", "a,b\n"))
    assert outcome.code == 2
    assert "columns are missing" in outcome.output


def test_planning_loads_no_mindspore():
    code = "import sys; sys.path.insert(0, 'tools'); import plan; sys.exit('mindspore' in sys.modules)"
    assert run("-c", code).code == 0
