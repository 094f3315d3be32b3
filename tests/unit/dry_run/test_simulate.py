# SPDX-License-Identifier: Apache-2.0
"""The simulation of ranks, against times counted by hand."""

import pytest

from sporeloom.dry_run.time.report import collectives
from sporeloom.dry_run.time.simulate import COMPUTE, PASS, GroupAxis, RankTime, Task, critical_path, simulate
from sporeloom.dry_run.time.trace import trace
from sporeloom.strategy.listed_schedule import needed
from sporeloom.strategy.schedule import passes, times

COMM = "communication"


def compute(name, seconds, *needs, **more):
    return Task(name, "matmul", COMPUTE, seconds, needs=needs, **more)


def collective(name, seconds, *needs, kind="AllReduce", **more):
    return Task(name, kind, COMM, seconds, needs=needs, **more)


def accounts(ranks):
    """Busy, exposed and idle seconds of each rank; all of them add up to the step."""
    end = max(of.end for of in ranks.values())
    sums = {rank: (sum(of.busy().values()), sum(of.exposed().values())) for rank, of in ranks.items()}
    return {rank: (busy, exposed, end - busy - exposed) for rank, (busy, exposed) in sums.items()}


def test_communication_hides_behind_what_does_not_need_it():
    tasks = [compute("a", 2), collective("sum of a", 5, 0), compute("b", 3), compute("c", 1, 1)]
    (of,) = simulate({0: tasks}).values()
    # a 0-2, its sum 2-7, b 2-5, c needs the sum: 7-8. Of 5 seconds of the sum 3 are hidden.
    assert [span[:2] for span in of.spans] == [(0, 2), (2, 7), (2, 5), (7, 8)]
    assert of.exposed() == {"AllReduce": 2}
    assert of.communication() == {"AllReduce": 5}


def test_collectives_of_a_stream_follow_each_other():
    tasks = [compute("a", 1), collective("x", 4, 0), compute("b", 1), collective("y", 2, 2, kind="AllGather")]
    (of,) = simulate({0: tasks}).values()
    assert [span[:2] for span in of.spans] == [(0, 1), (1, 5), (1, 2), (5, 7)]
    assert of.exposed() == {"AllReduce": 3, "AllGather": 2}


def test_a_collective_waits_for_the_last_rank():
    ranks = {
        rank: [compute("a", seconds), collective("sum", 2, 0, meets="sum"), compute("b", 1, 1)]
        for rank, seconds in ((0, 3), (1, 7))
    }
    found = simulate(ranks)
    assert [of.spans[1][:2] for of in found.values()] == [(7, 9), (7, 9)]
    assert accounts(found) == {0: (4, 2, 4), 1: (8, 2, 0)}
    assert critical_path(found) == {"matmul": 8, "AllReduce": 2, "launch": 0}


def test_ranks_that_wait_for_each_other_are_an_error():
    crossed = {0: [collective("x", 1, meets="x"), collective("y", 1, meets="y")]}
    crossed[1] = list(reversed(crossed[0]))
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(crossed)


def pipeline(num_stages, num_microbatches, schedule, seconds, message=0.0):
    """A pipeline whose passes take `seconds`, with messages as devices send them."""
    ranks = {}
    for stage in range(num_stages):
        tasks = ranks[stage] = []
        for one in passes(stage, num_stages, num_microbatches, 1, schedule):
            before = needed(one._replace(part=stage), num_stages - 1)
            if before and before.part != stage:
                last = [i for i, task in enumerate(tasks) if task.stream == COMPUTE][-1:]
                stream = f"from {before.part} to {stage}"
                tasks.append(Task("receive", "Receive", stream, message, needs=tuple(last), meets=(before, stage)))
                last = [len(tasks) - 1]
            else:
                last = []
            tasks.append(compute(f"{one.kind} {one.microbatch}", seconds[one.kind], *last))
            to = stage + (1 if one.kind == "forward" else -1)
            if 0 <= to < num_stages:
                own = one._replace(part=stage)
                meets, stream = (own, to), f"from {stage} to {to}"
                tasks.append(Task("send", "Send", stream, message, needs=(len(tasks) - 1,), meets=meets))
    return simulate(ranks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages_idle_for_one_microbatch(schedule):
    found = pipeline(2, 4, schedule, {"forward": 1, "backward": 2})
    assert accounts(found) == {0: (12, 0, 3), 1: (12, 0, 3)}  # (m + p - 1) (1 + 2) = 15 seconds
    assert critical_path(found)["matmul"] == 15


def test_messages_of_two_stages_are_exposed_where_they_are_received():
    found = pipeline(2, 2, "gpipe", {"forward": 1, "backward": 2}, message=0.5)
    # Stage 1 receives at 1-1.5 and 2.5-3 (it is busy from 1.5 to 2.5), and goes back at 4-6 and 6-8; stage 0 receives
    # at 6-6.5, works 6.5-8.5, receives at 8.5-9, works 9-11.
    assert max(of.end for of in found.values()) == 11
    assert found[1].exposed() == {"Receive": 1, "Send": 0.5}  # what it sends at 6-6.5 hides behind its last pass
    assert found[0].exposed() == {"Send": 0.5, "Receive": 1}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (3, 5), (4, 4), (4, 9)])
def test_a_pipeline_takes_as_long_as_its_drawing(schedule, num_stages, num_microbatches):
    found = pipeline(num_stages, num_microbatches, schedule, {"forward": 1, "backward": 2})
    drawn = times(num_stages, num_microbatches, 1, schedule)
    assert [of.end for of in found.values()] == [stage[-1][2] for stage in drawn]


def test_a_pass_stands_for_what_is_inside():
    inside = simulate({0: [compute("a", 2, launch=0.5), collective("sum", 3, 0), compute("b", 1, 1)]})[0]
    passes_of = [Task("pass", PASS, COMPUTE, inside.end, inside=inside)] * 2
    (of,) = simulate({7: passes_of}).values()
    assert of.end == 12
    assert of.busy() == {"matmul": 5, "launch": 1}
    assert of.exposed() == {"AllReduce": 6}
    assert critical_path({7: of}) == {"matmul": 5, "launch": 1, "AllReduce": 6}
    events = [event for event in trace({7: of})["traceEvents"] if event["ph"] == "X"]
    starts = [(event["name"], round(event["ts"] / 1e6), round(event["dur"] / 1e6)) for event in events]
    one = [("pass", 0, 6), ("a", 0, 2), ("sum", 2, 3), ("b", 5, 1)]
    assert starts == [*one, *((name, start + 6, length) for name, start, length in one)]


def test_nothing_takes_no_time():
    assert simulate({0: []}) == {0: RankTime([], [])}
    assert critical_path({0: RankTime([], [])}) == {}


def test_collectives_are_reported_and_drawn_with_their_algorithm():
    def sums(num_bytes):
        group = (GroupAxis(1, 2, (0, 1)), GroupAxis(8, 4, (0, 1, 2, 3)))
        return Task(
            "AllReduce of 8", "AllReduce", "communication", 1, num_bytes=num_bytes, group=group, algorithm="tree"
        )

    forward = Task("forward", PASS, COMPUTE, 2, inside=simulate({0: [sums(8), sums(64)]})[0])
    step = simulate({0: [forward, forward, Task("add", "memory", COMPUTE, 1)]})
    expected = {"kind": "AllReduce", "ranks": 8, "algorithm": "tree", "calls": 4, "bytes": [8, 64]}
    assert collectives(step.values()) == [expected]
    drawn = [event["args"] for event in trace(step)["traceEvents"] if event.get("cat") == "AllReduce"]
    assert drawn == [{"algorithm": "tree", "bytes": size} for size in (8, 64, 8, 64)]
