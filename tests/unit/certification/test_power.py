# SPDX-License-Identifier: Apache-2.0
"""Faulty programs are judged by the comparison of the proof, and escapes are named."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sporeloom.certification import power
from sporeloom.certification.page import page
from sporeloom.certification.planting import PlantedFault, SiteList, choose_sites
from sporeloom.certification.proof import ONE_DEVICE
from sporeloom.partition.faults import KIND_NAMES, KINDS, REPEATED_MICROBATCH, SWAPPED_MICROBATCHES, Site

LEFT_OUT, TWICE, STALE = "a sum over ranks is left out", "a sum over ranks is taken twice", KINDS[-1].name
WEIGHT, SMALL = np.array([0.5, -0.25], np.float32), np.array([8e-6, -8e-6], np.float32)


def write_run(folder, name, loss=2.0, small=SMALL, weight=WEIGHT):
    """What a training leaves: gradients of two parameters, one of which is small."""
    numbers = {"losses": [loss], "norms": [1.0]}
    for optimizer in ("AdamW", "SGD"):
        more = {"moved": {"w": 0.1, "small": 1e-4}} if name == ONE_DEVICE and optimizer == "SGD" else {}
        (folder / f"{name}.{optimizer}.json").write_text(json.dumps({**numbers, **more}))
    np.savez(folder / f"{name}.AdamW.npz", **{"adam_m.w": WEIGHT, "adam_m.small": small})
    np.savez(folder / f"{name}.SGD.npz", w=weight, small=SMALL)


FAULTS = [
    (LEFT_OUT, {"loss": 2.1}, "", "caught", "loss of step 1, AdamW: 2.1, on one device 2"),
    (LEFT_OUT, {"weight": WEIGHT + 5e-6}, "", "escaped", "weights differ by 5.0e-06, at most 1e-05"),
    (TWICE, {}, "", "without effect", ""),
    (TWICE, {}, "RuntimeError: shapes", "caught", "RuntimeError: shapes"),
    (STALE, {"small": SMALL / 2}, "", "caught", "gradient of small: 4e-06, on one device 8e-06"),
]


@pytest.fixture
def found(tmp_path):
    for name in (ONE_DEVICE, "0"):
        write_run(tmp_path, name)
    listed = []
    for number, (kind, change, error, *_) in enumerate(FAULTS):
        write_run(tmp_path, f"0-{number}", **change)
        listed.append(
            {"kind": kind, "part": "step", "operator": "y", "description": "AllReduce at mlp", "error": error}
        )
    (tmp_path / "0.faults.json").write_text(json.dumps(listed))
    return power.outcomes(tmp_path, [SimpleNamespace(mesh="dp 2")])


def test_the_comparison_of_the_proof_judges(found):
    assert [each.outcome for each in found] == [outcome for *_, outcome, _ in FAULTS]
    for each, (*_, details) in zip(found, FAULTS, strict=True):
        assert each.details.startswith(details)


def test_a_report_counts_by_kind_and_names_escapes(found):
    summary = power.summarize(found, smaller=[found[1]])
    report = power.lines(summary)
    assert report[0] == "planted faults: 3 of 5 caught"
    (row,) = (line for line in report if line.startswith(LEFT_OUT))
    assert row.split()[-4:] == ["2", "1", "1", "0"]
    named = f"{LEFT_OUT}: AllReduce at mlp (step, dp 2): weights differ by 5.0e-06, at most 1e-05"
    assert f"escaped: {named}" in report
    assert f"escaped on two processes, too: {named}" in report
    assert report[-1].startswith(f"no operator of the program fits {len(KIND_NAMES) - 3} kinds: ")
    assert SWAPPED_MICROBATCHES in report[-1]


def test_faults_of_a_schedule_are_listed_and_planted_where_there_are_microbatches():
    orders = {}
    for stage, number in ((0, 1), (0, 3), (1, 3)):
        listed = SiteList()
        assert list(listed.order(stage, number)) == list(range(number))
        for site in listed.sites:
            fault = PlantedFault(site)
            orders[stage, number, site.kind] = [list(fault.order(other, number)) for other in (0, 1)]
            assert fault.is_planted
    repeated, swapped = [[0, 1, 0], [0, 1, 0]], [[0, 1, 2], [1, 0, 2]]
    assert orders == {
        (0, 3, REPEATED_MICROBATCH): repeated,
        (1, 3, REPEATED_MICROBATCH): repeated,
        (1, 3, SWAPPED_MICROBATCHES): swapped,
    }


def test_sites_are_chosen_at_equal_distances():
    sites = [Site(LEFT_OUT, "step", str(number), "") for number in range(9)]
    chosen = lambda count: [int(site.operator) for site in choose_sites(sites, count)]  # noqa: E731
    assert chosen(1) == [4]
    assert chosen(3) == [1, 4, 7]
    assert chosen(20) == list(range(9))
    assert choose_sites(sites, 1, [TWICE]) == []


def test_a_page_shows_planted_faults(found):
    mesh = {"order": ["dp"], "dp": 2}
    values = {
        **{
            "verdict": "certified",
            "covers": {
                "strategy": {"mesh": mesh, "engine": "spmd"},
                "versions": dict.fromkeys(("mindspore", "sporeloom"), "1"),
            },
        },
        **{"reasons": [], "checks": {}, "strategy_file": "s.yaml", "made": "", "machine": "", "subject": "tiny"},
        "proof": {"limits": {}, "one_device_losses": [], "meshes": [], "strategies": []},
        **{"hashes": {}, "seconds": {}, "faults": power.summarize(found)},
    }
    written = page(values)
    assert "3 of 5 caught" in written
    assert f"<li>{LEFT_OUT}: AllReduce at mlp, dp 2: weights differ" in written
