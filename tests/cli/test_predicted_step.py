# SPDX-License-Identifier: Apache-2.0
"""`train --predicted` takes the report that a dry run of the same job prints."""

import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, tool

from sporeloom.core.errors import ConfigError
from sporeloom.train.checks import check
from sporeloom.train.plain_text import TrainConfig

STRATEGY = CONFIGS / "pangu_tiny_dp2_tp2.yaml"

pytestmark = pytest.mark.slow


def test_the_report_of_a_dry_run_fits_its_run_and_no_other(tmp_path):
    job = ("--config", TWO_LAYERS, "--strategy", STRATEGY, "--seq-len", 32, "--batch-size", 8)
    outcome = tool(
        "tools/dry_run.py", *job, "--ranks", "all", "--memory", "--time", "--cluster", "ascend910b", "--json"
    )
    assert outcome.code == 0, outcome.output
    path = tmp_path / "report.json"
    path.write_text(outcome.output[outcome.output.index("{") : outcome.output.rindex("}") + 1])
    flags = {"data": ROOT / "examples/small_town.txt", "config": TWO_LAYERS, "strategy": STRATEGY, "seq_len": 32}
    config = TrainConfig(**flags, predicted=path, output_dir=tmp_path / "out")
    prediction = check(config, None).prediction
    assert prediction.chip == "ascend910b" and prediction.step_time_s > 0 and prediction.memory_bytes > 0
    assert prediction.interval_s is None and "float32" in prediction.meaning
    with pytest.raises(ConfigError, match="a dry run with batch_size 8; that of this run is 4"):
        check(TrainConfig(**flags, batch_size=4, predicted=path, output_dir=tmp_path / "out"), None)
    refused = tool(
        "tools/train.py",
        *job[2:],
        "--data",
        flags["data"],
        "--config",
        TWO_LAYERS,
        "--predicted",
        path,
        "--output-dir",
        tmp_path / "out",
        processes=4,
    )
    assert refused.code == 2
    assert "of a step on ascend910b, and this process computes on CPUs" in refused.output
