# SPDX-License-Identifier: Apache-2.0
"""docs/reference/model_cards.md has the figures of the planner and of the networks that a server builds."""

import dataclasses
import importlib
import json
import math
import re
from pathlib import Path

import pytest
from conftest import ROOT

from sporeloom.cli import plan
from sporeloom.inference.cache import cache_bytes
from sporeloom.models.parameters import parameter_specs
from sporeloom.models.slots import num_slots_for
from sporeloom.planner.closed_forms import parameter_bytes
from sporeloom.planner.cluster import Cluster, read_cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.parallelism import Parallelism

PAGE = (ROOT / "docs/reference/model_cards.md").read_text(encoding="utf-8")
GB = 2**30
CHEAP = ("PanGu-alpha 2.6B", "CodeGeeX4 9B")
"""Cards whose plans take less than a second."""
SERVED = ("PanGu-alpha 2.6B", "PanGu-alpha 200B", "CodeGeeX4 9B")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("model_cards")


def card(script, title):
    return next(found for found in script.CARDS if found.title == title)


def section(title):
    return re.search(rf"(?ms)^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE)[1]


def rows(title, kind):
    """Cells of a card's table of `Training` or `Serving`."""
    text = section(title).partition(kind)[2].partition("\n\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()[2:]]


def number(cell):
    return float(cell.split()[0].replace(",", "").rstrip("%"))


def test_every_card_is_on_the_page_with_its_parameters_and_picture(script):
    assert re.findall(r"(?m)^## (.*)$", PAGE) == ["Contents", *(found.title for found in script.CARDS), "Intervals"]
    for found in script.CARDS:
        assert f"\n{script.facts(found)}\n\n" in section(found.title)
        assert (ROOT / found.path).read_text(encoding="utf-8") == script.picture(
            found.config, f"Architecture of {found.title}"
        )


def test_what_the_page_says_around_its_figures_is_what_the_script_writes(script):
    assert PAGE.startswith(f"{script.HEAD}\n{script.contents()}\n")
    assert PAGE.endswith(script.intervals())
    for found in script.CARDS:
        assert f"\n{script.served_line(found)}\n\n| device | weights | number of devices |" in section(found.title)
    assert {read_cluster(Path(name)).reserved_gb for name in script.CLUSTERS} == {script.RESERVED_GB}
    assert f"use {script.RESERVED_GB:g} GB less" in script.HEAD


def test_every_card_says_why_the_super_node_has_no_interval(script):
    why = "none: no run on dies of Ascend 910C is published; their efficiencies are those fitted on ascend910b"
    for found in script.CARDS:
        shown = [row[2] for row in rows(found.title, "Training") if row[0].startswith("cloudmatrix384")]
        assert shown and set(shown) == {why}


def test_a_card_names_the_slots_whose_bytes_it_gives(script):
    found = card(script, "PanGu-alpha 2.6B")
    slots = int(re.search(r"in ([\d,]+) slots", script.served_line(found))[1].replace(",", ""))
    assert slots == 1024 + 128  # the next multiple of 128 with one to spare
    keys_and_values = 2 * 32 * 2560 * 2  # of a token: two of each layer, in two bytes
    for row in rows(found.title, "Serving"):
        tp = int(number(row[2]))
        assert number(row[4]) == pytest.approx(script.ROWS * slots * keys_and_values / tp / GB, abs=0.0051)


def test_a_card_says_why_no_server_fits(script):
    found = card(script, "PaLM 540B")
    held = float_bytes(found.config, 16) + cache_bytes(
        dataclasses.replace(found.config, compute_dtype="bfloat16"), script.ROWS, 2048 + 128
    )
    assert found.config.num_heads % 32 and not found.config.num_heads % 16
    why = f"none: {held / GB:.0f} GB on each of 16; mesh.tp = 32 does not divide num_heads = {found.config.num_heads}"
    shown = [row[2] for row in rows(found.title, "Serving") if row[1] == "float32"]
    assert shown == [script.fewest_devices(found, usable * GB, weights="float32") for usable in (62, 78)] == [why, why]


@pytest.mark.parametrize(
    ("title", "total", "active"),
    [("openPangu 2.0 Flash", 91.60e9, 5.78e9), ("openPangu 2.0 Pro", 504.60e9, 18.18e9)],
)
def test_a_card_counts_parameters_as_published(title, total, active):
    shown = [int(text.replace(",", "")) for text in re.findall(r"[\d,]{9,}\d", section(title))]
    assert shown[0] == pytest.approx(total, abs=1e7)
    assert shown[1] == pytest.approx(active, abs=1e7)


@pytest.mark.parametrize("title", CHEAP)
def test_the_times_of_a_card_are_those_that_the_plan_command_prints(script, title, capsys):
    found = card(script, title)
    shown = rows(title, "Training")
    assert [row[0] for row in shown] == list(script.CLUSTERS)
    for cluster, step, interval, tokens, mfu, memory, strategy in shown:
        flags = {
            "model": found.family,
            "size": found.size,
            "cluster": cluster,
            "devices": found.devices,
            "global-batch-size": found.batch,
            "seq-len": found.seq_len,
        }
        assert (
            plan.main([word for name, value in flags.items() for word in (f"--{name}", str(value))] + ["--json"]) == 0
        )
        best = json.loads(capsys.readouterr().out)[0]
        assert number(step) == pytest.approx(best["step_time_s"], abs=5.1e-4)
        if cluster == "cloudmatrix384":
            assert (best["step_time_interval_s"], interval[:6]) == (None, "none: ")
            assert interval[6:] in best["interval"]["meaning"]
        else:
            bounds = [float(bound) for bound in re.findall(r"[\d.]+", interval)]
            assert bounds == pytest.approx(best["step_time_interval_s"], rel=6e-3)
        assert number(tokens) == pytest.approx(best["tokens_per_s"], abs=0.51)
        assert number(mfu) == pytest.approx(100 * best["mfu"], abs=0.051)
        assert number(memory) == pytest.approx(best["peak_bytes"] / GB, abs=0.051)
        job = best["strategy"]
        assert strategy.startswith(f"tp {job['tp']}, pp {job['pp']}, dp {job['dp']}")


@pytest.mark.parametrize("title", SERVED)
def test_the_memory_of_a_server_is_that_of_closed_formulas_on_the_fewest_devices(script, title):
    config = dataclasses.replace(card(script, title).config, compute_dtype="bfloat16")
    cache = cache_bytes(config, script.ROWS, num_slots_for(min(script.SERVED_TOKENS, config.seq_len)))
    clusters = [Cluster.of_chip(name) for name in script.SERVERS for _ in ("float32", "int8")]
    for cluster, row in zip(clusters, rows(title, "Serving"), strict=True):
        device, kind, devices, weights, of_cache = row
        assert number(device) == cluster.memory_gb
        tp, usable = int(number(devices)), cluster.usable_bytes
        bytes_of = {"float32": float_bytes, "int8": int8_bytes}[kind]
        held_heads = max(1, config.kv_heads // tp)
        own_cache = cache * held_heads // config.kv_heads
        assert number(weights) == pytest.approx(bytes_of(config, tp) / GB, abs=0.0051)
        assert number(of_cache) == pytest.approx(own_cache / GB, abs=0.0051)
        assert bytes_of(config, tp) + own_cache <= usable
        if tp > 1:
            assert bytes_of(config, tp // 2) + cache * max(1, config.kv_heads // (tp // 2)) // config.kv_heads > usable


def float_bytes(config, tp):
    return parameter_bytes(of_decoder(config), Parallelism(tp=tp))[0]


def int8_bytes(config, tp):
    """A byte an entry of matrices and of the token embedding, and a float32 scale of each row; the others in float32."""
    total = 0
    for spec in parameter_specs(config):
        is_coarse = spec.use == "matrix" or spec.name in ("embedding.word.weight", "head.weight")
        shards = {"whole": 1, "tp": tp, "kv": min(tp, config.kv_heads)}[spec.sharding]
        if is_coarse:
            is_cut_by_rows = spec.name.rpartition(".")[0].rpartition(".")[2] not in ("output", "down")
            total += math.prod(spec.shape) // shards + 4 * spec.shape[0] // (shards if is_cut_by_rows else 1)
        else:
            total += 4 * math.prod(spec.shape) // shards
    return total


def test_a_card_without_an_interval_or_a_strategy_that_fits_says_so(script):
    found = card(script, "PanGu-alpha 13B")
    nowhere = dataclasses.replace(found, devices=1, batch=1)
    assert script.training_row(nowhere, "ascend910b")[-1].startswith("nothing fits: the nearest strategy needs ")
    why = script.fewest_devices(found, 1e6, weights="int8")
    assert re.fullmatch(r"none: \d+ GB on each of 8; mesh\.tp = 16 does not divide num_heads = 40", why)
