# SPDX-License-Identifier: Apache-2.0
"""A search goes on around its best: neighbours are legal, and the one that is fastest by simulation is found."""

import dataclasses

import pytest
from tuned import tune_request

from sporeloom.strategy.config import OptimizerParallel, Pipeline, Recompute, Strategy
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy_search import simulated
from sporeloom.strategy_search.candidates import Candidate, meshes, problems
from sporeloom.strategy_search.neighbours import neighbours
from sporeloom.strategy_search.scoring import Scored, score_neighbours
from sporeloom.strategy_search.simulated import simulate_all

DP4 = Candidate(Strategy(mesh=Mesh(dp=4), recompute=Recompute()), 2)
PP2 = Candidate(
    Strategy(
        mesh=Mesh(pp=2, dp=2),
        pipeline=Pipeline(num_microbatches=4),
        optimizer_parallel=OptimizerParallel(),
        recompute=Recompute(kind="selective", per_stage=[2, 1]),
    )
)


@pytest.fixture
def request_(tmp_path):
    request = tune_request(tmp_path, size="tiny", devices=4, batch=16)
    plain = dataclasses.replace(request.model.values, attention="plain")
    return dataclasses.replace(request, model=dataclasses.replace(request.model, values=plain))


def scored(candidate, seconds=1.0):
    return Scored(candidate, candidate.name, seconds, 1.0)


@pytest.mark.parametrize(
    ("start", "some"),
    [
        (
            DP4,
            {
                *("dp4_m4_recompute", "dp4_m1_recompute", "dp4_m2", "dp4_m2_selectivecompute"),
                *("dp4_m2_zero1_recompute", "dp4_m2_zero3_recompute", "dp2_tp2_m4_recompute", "pp2_dp2_m4_recompute"),
            },
        ),
        (
            PP2,
            {
                *("pp2_dp2_m8_zero1_selectivecompute-2-1", "pp2_dp2_m2_zero1_selectivecompute-2-1", "pp2_dp2_m4_zero1"),
                *("pp2_dp2_m4_zero1_selectivecompute-1-0", "pp2_dp2_m4_dualpipe_v_zero1_selectivecompute-2-1"),
                *("pp4_m8_selectivecompute", "pp2_tp2_m8_sp_selectivecompute", "dp4_m2_zero1_selectivecompute"),
            },
        ),
    ],
    ids=["replicas", "stages"],
)
def test_neighbours_change_one_setting_and_their_files_say_so(request_, tmp_path, start, some):
    found = {one.name: one for one in neighbours(request_, start)}
    assert some <= found.keys() and start.name not in found
    for one in found.values():
        path = tmp_path / "one.yaml"
        path.write_text(request_.text(one))
        loaded = load_strategy(path)
        assert dataclasses.replace(one.strategy, rules=loaded.rules) == loaded, one.name
        assert not problems(request_, Candidate(loaded, one.accumulate)) and loaded.mesh.size == 4


def test_neighbours_are_scored_fastest_first(request_):
    found = score_neighbours(request_, DP4)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert {one.name for one in found} == {one.name for one in neighbours(request_, DP4)}


def test_a_search_walks_to_a_neighbour_of_a_neighbour(request_, tmp_path, monkeypatch):
    """Each step is faster than the last one; the first choices are one strategy."""
    path = {DP4.name: 1.0, "dp4_m2": 0.5, "dp4_m1": 0.25}
    asked = []

    def simulate(request, candidate, file):
        asked.append(candidate.name)
        return {"seconds": path.get(candidate.name, 2.0), "peak_bytes": 1, "problem": ""}

    monkeypatch.setattr(simulated, "simulate", simulate)
    monkeypatch.setattr(simulated, "SLOWER", 1e9)
    seconds = {one.name: one.seconds for one in score_neighbours(request_, DP4)}
    found = list(simulate_all(request_, [scored(DP4, min(seconds.values()))], 200, tmp_path / "out"))
    assert min(found, key=lambda one: one.seconds).name == "dp4_m1"
    assert len(asked) == len(set(asked)), "nothing is simulated twice"


def test_few_meshes_have_every_number_of_stages(tmp_path):
    request = tune_request(tmp_path, devices=8, batch=64)
    everything = {job.pp for job in meshes(request, 10_000)}
    few = meshes(request, 16)
    assert len(few) == 16 and {job.pp for job in few} == everything == {1, 2, 4, 8}
    assert few[:8] == meshes(request, 8)[:4] + few[4:8]
