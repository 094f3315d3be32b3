# SPDX-License-Identifier: Apache-2.0
"""Profiles: spans of ranks become one trace, and a mesh's trace has its collectives and messages."""

import json
from collections import Counter

import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, in_process, tool

from sporeloom.runtime.trace import Span, Trace
from sporeloom.train.profile import chrome_trace, describe, segments

SPANS = [
    Span("communication", "AllReduce", 12.0, 13.0),
    Span("wait", "for rank 1", 12.0, 12.5),
    Span("communication", "AllGather", 15.0, 16.0),
    Span("graph", "program 0", 11.0, 18.0),
    Span("communication", "Receive", 18.0, 19.0),
    Span("loop", "step 3", 10.0, 20.0),
]


def test_segments_are_what_is_left_of_graphs_without_their_collectives():
    found = [(span.name.split(", after ")[1], span.begin, span.end) for span in segments(SPANS)]
    assert found == [("the beginning", 11.0, 12.0), ("AllReduce", 13.0, 15.0), ("AllGather", 16.0, 18.0)]
    assert describe([SPANS]) == "compute 50%, communication 30%, waiting 5%"


def test_shares_are_of_what_is_inside_of_steps():
    outside = [
        Span("loop", "validation", 20.0, 29.0),
        Span("graph", "program 1", 20.0, 29.0),
        Span("communication", "AllReduce", 21.0, 28.0),
        Span("wait", "for rank 1", 21.0, 28.0),
        Span("wait", "for rank 1", 10.0, 11.0),  # of the batch, not of a message
        Span("loop", "step 4", 30.0, 40.0),
        Span("graph", "program 0", 30.0, 40.0),
    ]
    assert describe([SPANS + outside]) == "compute 75%, communication 15%, waiting 2%"
    assert describe([SPANS, SPANS[::-1]]) == describe([SPANS])
    assert describe([[]]) == "compute 0%, communication 0%, waiting 0%"


def test_a_trace_has_a_process_for_each_rank_on_one_clock():
    later = [Span("loop", "step 3", 10.5, 21.0)]
    events = chrome_trace({0: SPANS, 1: later})["traceEvents"]
    steps = {event["pid"]: (event["ts"], event["dur"]) for event in events if event["name"] == "step 3"}
    assert steps == {0: (0.0, 10e6), 1: (0.5e6, 10.5e6)}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}


def test_nothing_is_recorded_before_it_begins_and_after_it_ends():
    trace = Trace()
    trace.add("loop", "early", 0.0)
    trace.begin()
    trace.add("loop", "in time", 0.0)
    assert [span.name for span in trace.end()] == ["in time"]
    trace.add("loop", "late", 0.0)
    assert trace.end() == []


@pytest.mark.slow
def test_a_mesh_writes_one_trace_of_all_ranks(tmp_path):
    out = tmp_path / "out"
    strategy = tmp_path / "strategy.yaml"
    strategy.write_text(
        f"mesh: {{pp: 2, tp: 2}}\nrules: {CONFIGS}/rules/decoder.yaml\npipeline: {{num_microbatches: 2}}\n"
    )
    outcome = tool(
        *("tools/train.py", "--data", ROOT / "examples" / "small_town.txt", "--config", TWO_LAYERS, "--seq-len", 32),
        *("--steps", 4, "--profile", "2-3", "--output-dir", out, "--strategy", strategy),
        processes=4,
    )
    assert outcome.code == 0, outcome.output
    assert f"profile in {out}/profile.json" in outcome.output
    events = [event for event in json.loads((out / "profile.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    steps = {(e["pid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("step ")}
    assert set(steps) == {(rank, f"step {step}") for rank in range(4) for step in (2, 3)}
    counts = {step: Counter() for step in (2, 3)}
    for event in events:
        if event["cat"] == "communication":
            (step,) = (
                int(name[-1])
                for (rank, name), (begin, end) in steps.items()
                if rank == event["pid"] and begin <= event["ts"] <= end
            )
            counts[step][event["pid"], event["name"].split(",")[0]] += 1
    assert counts[2] == counts[3]
    assert any(name.startswith("AllReduce of model.") for _, name in counts[2])
    assert counts[2][2, "Receive of microbatch 0 from rank 0"] and counts[2][0, "Receive of microbatch 0 from rank 2"]
    for rank in range(4):
        mine = [event for event in events if event["pid"] == rank]
        graphs, parts = (sum(e["dur"] for e in mine if e["cat"] == kind) for kind in ("graph", "segment"))
        assert 0 < parts < graphs <= sum(end - begin for (of, _), (begin, end) in steps.items() if of == rank)
    summary = json.loads((out / "summary.json").read_text())["time_s"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert summary["communication"] > 0 and summary["compute"] > 0
    assert summary["communication"] + summary["compute"] <= sum(line["step_time_s"] for line in lines) + 0.01
    assert not list(out.glob(".profile*"))


@pytest.mark.parametrize(
    ("steps", "told"),
    [("0-2", "--profile 0-2"), ("a", "--profile a: give steps as 61-80"), ("3-9", "the run has 5 steps")],
)
def test_steps_that_do_not_exist_are_refused(steps, told, tmp_path):
    outcome = in_process(
        *("tools/train.py", "--data", ROOT / "examples" / "small_town.txt", "--steps", 5, "--profile", steps),
        *("--output-dir", tmp_path / "out"),
    )
    assert outcome.code == 2 and told in outcome.output
