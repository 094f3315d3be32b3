# SPDX-License-Identifier: Apache-2.0
"""What closed forms do not see is varied by simulation: the placement of ranks, and rules of operators."""

import pytest
from tuned import tune_request

from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy_search.candidates import ALTERNATIVES, Candidate, problems, variations
from sporeloom.strategy_search.scoring import Scored
from sporeloom.strategy_search.simulated import simulate_all

DP2_TP2 = Candidate(Strategy(mesh=Mesh(dp=2, tp=2), sequence_parallel=True))
ACROSS = {"devices_per_node": 2, "inter_node_gb_per_s": 1, "intra_node_gb_per_s": 100}
SLOW = {"devices_per_node": 4, "intra_node_gb_per_s": 1}


@pytest.mark.parametrize(
    ("batch", "cluster", "planted"),
    [(2, ACROSS, "tp2_dp2_m1_sp"), (64, SLOW, "dp2_tp2_m1_sp_mlp-by-tokens")],
    ids=["large gradients stay in a server", "many tokens go by few weights"],
)
def test_a_planted_optimum_is_found(tmp_path, batch, cluster, planted):
    request = tune_request(tmp_path, size="tiny", devices=4, batch=batch, cluster=cluster)
    found = list(simulate_all(request, [Scored(DP2_TP2, DP2_TP2.name, 1.0, 1.0)], 3, tmp_path / "out"))
    assert found[0].name == DP2_TP2.name and not any(one.problem for one in found)
    best = min(found, key=lambda one: one.seconds)
    assert best.name == planted and best.seconds < 0.95 * found[0].seconds


def test_variations_are_legal_and_their_files_say_so(tmp_path):
    request = tune_request(tmp_path, size="embedded_7b", devices=8, batch=8, cluster=ACROSS)
    start = Candidate(Strategy(mesh=Mesh(dp=4, tp=2), sequence_parallel=True))
    found = [start, *variations(request, start)]
    assert len({one.name for one in found}) == len(found)
    assert {name for one in found for name in one.rules} == ALTERNATIVES.keys()
    for one in found[1:]:
        path = tmp_path / "one.yaml"
        path.write_text(request.text(one))
        loaded = load_strategy(path)
        assert loaded.mesh == one.strategy.mesh and not problems(request, Candidate(loaded, one.accumulate))
        assert len(loaded.rules.operators) > 50
