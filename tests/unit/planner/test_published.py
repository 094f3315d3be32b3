# SPDX-License-Identifier: Apache-2.0
import csv
import importlib.util

import numpy as np
import pytest
from conftest import ROOT, shared

from sporeloom.errors import ConfigError
from sporeloom.planner.published import UnpredictableError, describe, read_rows
from sporeloom.planner.validate import predict, validate

MEASURED = ("iter_s", "tflops_per_device", "mfu_pct", "hfu_pct")


@pytest.fixture(scope="module")
def rows():
    return read_rows(shared("facts/published_runs.csv"))


def test_step_time_and_memory_of_the_published_runs():
    report = validate(shared("facts/published_runs.csv"))
    time = report["step_time"]
    assert time["rows"] >= 300
    assert time["median_abs_error"] <= 0.12
    assert time["p90_abs_error"] <= 0.35
    assert sum(group["rows"] for group in time["by_source"].values()) == time["rows"]
    assert sum(group["rows"] for group in time["by_chip"].values()) == time["rows"]
    assert report["fits"]["share_right"] >= 0.95
    assert report["fits"]["does_not_fit_right"] > 0
    assert report["not_predicted"]


def test_mt_nlg_is_within_eight_percent(rows):
    predictions, _ = predict([row for row in rows if row["id"].startswith("mtnlg")])
    assert sorted(p.found.seconds for p in predictions) == [44.4, 50.2, 60.1]
    for prediction in predictions:
        assert abs(prediction.time_error) <= 0.08, prediction.run.id


def test_predictions_do_not_look_at_what_was_measured(rows):
    described = 0
    for row in rows:
        changed = {**row, **dict.fromkeys(MEASURED, "123.4")}
        try:
            run = describe(row)
        except UnpredictableError:
            continue
        assert describe(changed) == run
        described += 1
    assert described > 300


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_fit_holds_for_rows_it_has_not_seen(rows, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("fit_planner", ROOT / "benchmarks" / "fit_planner.py")
    fit_planner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fit_planner)
    errors = fit_planner.held_out_errors(fit_planner.pairs_of(rows), seed=0)
    assert len(errors) > 90
    assert np.median(errors) <= 0.12
    assert np.quantile(errors, 0.9) <= 0.35


def test_rows_that_cannot_be_predicted_say_why(rows):
    row = next(row for row in rows if row["id"].startswith("mtnlg"))
    for change, reason in (
        ({"layers": ""}, "no layers"),
        ({"chip": "Abacus"}, "chip Abacus: nothing is known of it"),
        ({"tp": "7"}, "tp x pp x cp does not divide the devices"),
        ({"hidden": "20481"}, "hidden_size 20481 is not divisible by num_heads 128"),
        ({"seq": "long"}, "not a number"),
        ({"mem_gb": "16 or 32"}, "not a number"),
        ({"layers": "10.5"}, "'10.5' is no whole number"),
        ({"tp": "0"}, "is zero"),
        ({"recompute": "sometimes"}, "recompute sometimes: not known"),
        ({"note": "MoE experts=8"}, "mixture of experts"),
    ):
        with pytest.raises(UnpredictableError, match=reason):
            describe({**row, **change})


def test_a_file_of_other_columns_is_refused(write):
    with pytest.raises(ConfigError, match="columns are missing: model, layers"):
        read_rows(write("runs.csv", "a,b\n1,2\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(ROOT / "no_such.csv")


def test_a_measured_time_beyond_the_chips_peak_is_set_aside(rows, tmp_path):
    row = next(row for row in rows if row["id"].startswith("mtnlg"))
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow({**row, "iter_s": "1.0"})
    assert validate(path)["not_predicted"] == {"measured faster than the chip's peak": 1}
