# SPDX-License-Identifier: Apache-2.0
"""What the strategy says of context parallel, and what rules make of it."""

import dataclasses

import pytest

from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh


@pytest.mark.parametrize(("method", "layout"), [("gather", ((), ("cp",))), ("ulysses", (("cp",), ()))])
def test_a_method_decides_what_its_axes_are(tmp_path, method, layout):
    path = tmp_path / "s.yaml"
    path.write_text(
        f"mesh: {{cp: 2}}\ncontext_parallel: {method}\nrules:\n  operators:\n    a.b: [[cp_heads, cp_tokens]]\n"
    )
    assert load_strategy(path).rules.operators[0].inputs == (layout,)


def test_inference_takes_its_ranks_for_replicas():
    whole = load_strategy("pangu_tiny_dp2_cp2_ulysses", for_inference=True)
    assert whole.mesh == Mesh(dp=4)
    assert whole.optimizer_parallel is None
    mesh = Mesh(pp=2, dp=2, cp=4, tp=8)
    assert mesh.for_inference() == Mesh(pp=2, dp=8, tp=8)
    assert mesh.for_inference().size == mesh.size
    assert dataclasses.replace(whole, mesh=mesh.for_inference()).mesh.cp == 1
