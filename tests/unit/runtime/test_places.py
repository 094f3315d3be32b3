# SPDX-License-Identifier: Apache-2.0
import pytest

from sporeloom.runtime.places import place_of

NET = "Default/network-PipelineCell/network-PanGuWithLoss/model-TopQueryDecoder/layers-CellList/0-DecoderLayer/mlp-MLP"


@pytest.mark.parametrize(
    ("domain", "place"),
    [
        (f"{NET}/up-Linear/MatMul-op7", "model.layers.0.mlp.up, forward"),
        (f"Gradients/{NET}/Grad_GeLU/GeLUGrad-op0", "model.layers.0.mlp, backward"),
        (f"recompute_{NET}/GeLU-op0", "model.layers.0.mlp, recomputed"),
        ("Default/ReduceSum-op1", "the training step"),
        ("", "the training step"),
    ],
)
def test_a_domain_is_a_path(domain, place):
    assert place_of(domain) == place
