# SPDX-License-Identifier: Apache-2.0
"""Drawings of a dry run: groups on servers, memory over a step, what time goes to."""

import re

import pytest

from sporeloom.dry_run.memory.drawing import curves
from sporeloom.dry_run.time.drawing import breakdown, drawing
from sporeloom.dry_run.topology import SHOWN_SERVERS, topology

GB = 2**30


def collective(group, sent, count=1):
    return {"group": group, "bytes_per_step": sent, "count": count}


def test_groups_are_drawn_on_their_servers_the_busiest_first():
    rank = {
        "rank": 9,
        "groups": {"tp": list(range(8, 16)), "dp": list(range(1, 64, 8)), "idle": [9]},
        "collectives": [collective("dp", 3 * GB), collective("tp", GB, 4), collective("tp", GB, 4)],
    }
    drawn = topology(rank, 64, 8)
    assert re.findall("<figcaption>(.*?)</figcaption>", drawn) == ["dp", "tp"]
    dp, tp = drawn.split("<figure>")[1:]
    assert "8 ranks across 8 servers: 3 GB in 1 calls a step" in dp and dp.count("<rect") == 64
    assert "8 ranks within one server: 2 GB in 8 calls a step" in tp
    assert re.findall(r"server (\d+)<", tp) == ["1"]
    assert len(re.findall("fill='#", tp)) == 8 and len(re.findall("fill='#", dp)) == 8
    framed = re.findall(r"stroke-width='2'><title>rank (\d+)</title>", drawn)
    assert framed == ["9", "9"], "the rank itself"


def test_many_servers_are_not_all_drawn():
    rank = {"rank": 0, "groups": {"dp": list(range(0, 800, 8))}, "collectives": [collective("dp", 1)]}
    drawn = topology(rank, 800, 8)
    assert drawn.count("<text") == SHOWN_SERVERS and f"and {100 - SHOWN_SERVERS} more servers" in drawn


def test_the_last_server_may_have_fewer_devices():
    rank = {"rank": 0, "groups": {"tp": [0, 1]}, "collectives": [collective("tp", 1)]}
    assert topology(rank, 4, 8).count("<rect") == 4


def memory(peak, pool):
    return {
        "live_bytes": peak,
        "allocated_bytes": peak,
        "pool_bytes": pool,
        "peak_in": "forward pass of part 0, run 1",
        "peak_tick": 5,
        "num_ticks": 10,
        "curve": [(0, 0), (5, peak), (10, 0)],
        "phases": [(0, "forward pass of part 0, run 1"), (6, "update, run 1")],
    }


@pytest.mark.parametrize(("limit", "line"), [(100 * GB, False), (11 * GB, True), (8 * GB, True)])
def test_the_limit_is_drawn_where_the_curve_comes_near_it(limit, line):
    drawn = curves([{"rank": 0, "memory": memory(10 * GB, 10.5 * GB)}], limit)
    assert ("class='limit'" in drawn) == line
    assert ("does not fit into 8 GB: 31.2% too much" in drawn) == (limit == 8 * GB)
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", re.search("points='(.*?)'", drawn)[1])]
    assert min(heights) >= 10, "inside the picture"
    assert "10 GB" in drawn and ">F<" in drawn and ">update<" in drawn


def test_equal_ranks_have_one_curve():
    ranks = [{"rank": rank, "memory": memory(GB, GB)} for rank in range(4)]
    assert curves(ranks).count("<polyline") == 1 and "ranks 0 to 3" in curves(ranks)


TIME = {
    "seconds": 0.010,
    "stages": [
        {
            "stage": 0,
            "busy": {"matmul": 0.005, "other": 0.001},
            "exposed": {"AllReduce": 0.002},
            "idle_s": 0.002,
            "passes": [("forward of part 0", 0.0, 0.004), ("backward of part 0", 0.006, 0.010)],
        }
    ],
}


def test_where_time_goes_adds_up_to_the_step():
    drawn = breakdown(TIME)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
    assert sum(widths) == pytest.approx(100 / 1.02, abs=0.05)
    assert "exposed AllReduce 2 ms" in drawn and "other 1 ms" in drawn and "20.0% idle" in drawn


def test_passes_are_drawn_in_time_with_a_scale():
    drawn = drawing(TIME)
    bars = re.findall(r"<rect x='([\d.]+)' y='2' width='([\d.]+)'", drawn)
    assert [(float(x), float(width)) for x, width in bars] == [(0, 400), (600, 400)]
    assert "data-ms='10'" in drawn and ">10 ms</span>" in drawn
