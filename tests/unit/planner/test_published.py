# SPDX-License-Identifier: Apache-2.0
import csv
import dataclasses

import pytest
from conftest import ROOT, shared

from sporeloom.core.errors import ConfigError
from sporeloom.planner.errors import published_errors
from sporeloom.planner.layer_time import layer_forward
from sporeloom.planner.published import (
    CORRECTIONS,
    CUDNN_SHARE,
    UnpredictableError,
    corrected,
    describe,
    measured,
    read_rows,
)
from sporeloom.planner.published_experts import describe_experts, read_expert_rows
from sporeloom.planner.rates import Rates
from sporeloom.planner.validate import predict, validate

MEASURED = ("iter_s", "tflops_per_device", "mfu_pct", "hfu_pct")


@pytest.fixture(scope="module")
def rows():
    return read_rows(shared("facts/published_runs.csv"))


def test_step_time_and_memory_of_the_published_runs():
    report = validate(shared("facts/published_runs.csv"))
    time = report["step_time"]
    assert time["rows"] >= 300
    assert time["median_abs_error"] <= 0.07
    assert time["p90_abs_error"] <= 0.25
    assert sum(group["rows"] for group in time["by_source"].values()) == time["rows"]
    assert sum(group["rows"] for group in time["by_chip"].values()) == time["rows"]
    assert report["not_predicted"]
    memory = report["memory"]
    assert memory["rows"] == 76
    assert memory["median_abs_error"] <= 0.07
    assert abs(memory["median_error"]) <= 0.03


def test_memory_is_judged_of_every_run_that_ran_or_failed(rows):
    """Counted here from the columns, not from what was measured of memory alone."""
    fits = validate(shared("facts/published_runs.csv"))["fits"]
    predictions, _ = predict(rows)
    by_id = {row["id"]: row for row in rows}
    failed, ran = set(), set()
    for one in predictions:
        row = by_id[one.run.id]
        speeds = [row[name] for name in ("iter_s", "tflops_per_device", "mfu_pct", "hfu_pct")]
        told = any(f"{word}=" in row["note"] for word in ("measured_mem_gb", "derived_iter_s_eq3", "tps_dev", "tok_s"))
        if "OOM" in row["note"] or "FAILED" in row["note"]:
            failed.add(one.run.id)
        elif told or any(speeds):
            ran.add(one.run.id)
    assert fits["rows"] == len(ran) + len(failed) > 330 and fits["not_judged"] == len(predictions) - fits["rows"]
    too_large = {one.run.id for one in predictions if one.memory.needed > one.run.cluster.usable_bytes}
    in_any_case = {one.run.id for one in predictions if one.memory.least > one.run.cluster.usable_bytes}
    assert in_any_case <= too_large
    assert set(fits["said_not_to_fit_but_ran"]) == ran & in_any_case
    assert set(fits["said_to_fit_but_failed"]) == failed - too_large
    assert fits["undecided"] == len((ran | failed) & too_large - in_any_case) <= 1
    assert fits["does_not_fit_wrong"] == len(ran & in_any_case) <= 2
    assert fits["fits_wrong"] == len(failed - too_large) <= 2
    assert fits["right"] == fits["rows"] - fits["undecided"] - fits["does_not_fit_wrong"] - fits["fits_wrong"]
    assert fits["share_right"] >= 0.97
    parts = fits["all_published"], fits["partly_assumed"]
    for name in ("rows", "right", "fits_right", "fits_wrong", "does_not_fit_right", "does_not_fit_wrong", "undecided"):
        assert sum(part[name] for part in parts) == fits[name]


def test_a_run_with_nothing_but_a_speed_ran(rows):
    row = next(row for row in rows if row["id"] == "mcore_h100_70b")
    assert measured(row, describe(row)).fits
    without = {**row, "tflops_per_device": "", "mfu_pct": "", "hfu_pct": ""}
    assert measured(without, describe(without)).fits is None
    assert measured({**without, "note": "OOM"}, describe(without)).fits is False


def test_mt_nlg_is_inside_the_interval_of_its_chip(rows):
    predictions, _ = predict([row for row in rows if row["id"].startswith("mtnlg")])
    assert sorted(p.found.seconds for p in predictions) == [44.4, 50.2, 60.1]
    for prediction in predictions:
        interval = published_errors()["dense"][prediction.run.cluster.chip]
        assert interval["low"] <= 1 / (1 + prediction.time_error) <= interval["high"], prediction.run.id


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


def test_rows_that_cannot_be_predicted_say_why(rows):
    row = next(row for row in rows if row["id"].startswith("mtnlg"))
    for change, reason in (
        ({"layers": ""}, "no layers"),
        ({"chip": "Abacus"}, "chip Abacus: no data sheet is known"),
        ({"tp": "7"}, "tp x pp x cp does not divide the devices"),
        ({"hidden": "20481"}, "hidden_size 20481 is not divisible by num_heads 128"),
        ({"seq": "long"}, "not a number"),
        ({"mem_gb": "16 or 32"}, "not a number"),
        ({"layers": "10.5"}, "'10.5' is not a whole number"),
        ({"tp": "0"}, "is zero"),
        ({"recompute": "sometimes"}, "recompute sometimes: unknown"),
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


def row_named(rows, name):
    return next(row for row in rows if row["id"] == name)


def test_recipes_of_megatron_shard_sequences_and_overlap_in_fp8(rows):
    job = describe(row_named(rows, "bridge_2509_llama3_70b")).job
    assert job.sequence_parallel and job.overlaps_tensor_parallel and job.overlaps_sends
    assert job.attention_share == CUDNN_SHARE == 0.5 and job.overlaps_new_weights and job.reduced_bytes == 2
    vanilla, sliced = (describe(row_named(rows, f"titan_atp_70b_{kind}")).job for kind in ("vanilla", "async"))
    assert sliced.overlaps_tensor_parallel and not vanilla.overlaps_tensor_parallel
    assert vanilla.attention_share == sliced.attention_share == 0


def test_torchtitan_gathers_sequences_in_fp8_unless_rows_have_scales(rows):
    names = ("titan_70b_tp8", "titan_atp_70b_f8_vanilla", "titan_atp_70b_vanilla", "bridge_2509_llama3_70b")
    assert [describe(row_named(rows, name)).job.gathers_fp8 for name in names] == [True, True, False, False]
    by_row = {**row_named(rows, "titan_atp_70b_f8_vanilla"), "precision": "fp8 rowwise"}
    assert not describe(by_row).job.gathers_fp8


def test_rows_are_corrected_by_their_sources(rows):
    with shared("facts/published_runs.csv").open(newline="") as file:
        before = {row["id"]: row for row in csv.DictReader(file)}
    found = {name: describe(row_named(rows, name)) for name in CORRECTIONS}
    long = "mf_r1.0_llama2_13b_FA_1812"
    assert before[long]["seq"] == "4096" and found[long].dims.seq_len == 2048 and found[long].job.flash_attention
    seconds = [float(row["iter_s"]) for row in (before[long], row_named(rows, long))]
    assert seconds[1] == pytest.approx(seconds[0] / 2)  # from tokens/s
    assert found["mf_r0.8_llama2_7b_3523"].job.recompute == "selective"
    assert found["ascendspeed_llama_13b_8p"].job.recomputed(40) == (3, 2, 1, 0, 0, 0, 0, 0)
    assert not found["ascendspeed_baichuan_13b"].job.flash_attention
    assert corrected(row_named(rows, long))["iter_s"] == row_named(rows, long)["iter_s"]


def test_torchtitan_gathers_weights_once_for_all_microbatches_of_a_pipeline(rows):
    assert describe(row_named(rows, "titan_405b_1f1b")).job.gathers == "step"
    assert describe(row_named(rows, "titan_70b_tp8")).job.gathers == "microbatch"


def test_jean_zay_has_its_published_network(rows):
    run = describe(row_named(rows, "bloom_pre_079"))
    assert run.cluster.inter_node_gb_per_s * run.cluster.devices_per_node == 4 * 100 / 8


def test_interleaved_stages_of_uneven_layers_have_two_parts(rows):
    plain, interleaved = (describe(row_named(rows, f"titan_405b_{kind}")).job for kind in ("1f1b", "interleaved"))
    assert (plain.virtual_stages, interleaved.virtual_stages) == (1, 2)


def test_products_of_latent_attention_are_those_of_its_matrices():
    row = next(row for row in read_expert_rows(shared("facts/published_moe_runs.csv")) if row["id"] == "na_dsv3_1024")
    run = describe_experts(row)
    rates = Rates(run.dims, run.job, run.cluster)
    latent = layer_forward(run.dims, run.job, rates)
    plain = layer_forward(dataclasses.replace(run.dims, attention_matrices=0), run.job, rates)
    entries = 2 * run.dims.hidden_size * (run.dims.query_size + run.dims.kv_size)
    less = 2 * run.dims.seq_len * (entries - run.dims.attention_matrices) / rates.flops
    assert less < plain.matmul - latent.matmul < 1.5 * less
    assert run.job.attention_share == CUDNN_SHARE
