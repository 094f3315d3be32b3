# SPDX-License-Identifier: Apache-2.0
"""What a matrix consists of in int8 or int4 is sharded like the matrix: otherwise each rank would hold all of it."""

import dataclasses

import pytest
from conftest import CONFIGS

from sporeloom.inference.model import build_model
from sporeloom.models.family import size_config
from sporeloom.models.weight_formats import WEIGHT_FORMATS
from sporeloom.strategy.loader import load_strategy

MODELS = {
    ("pangu", "tiny"): "pangu_tiny_dp2_tp2",
    ("codegeex", "4_tiny"): "pangu_tiny_dp2_tp2",
    ("pangu", "ultra_moe_tiny"): "pangu_pro_moe_tiny_ep2_tp2",
    ("pangu", "pro_moe_tiny"): "pangu_pro_moe_tiny_ep2_tp2",
}


def layouts(family, model, strategy, weights):
    net = build_model(family, model, strategy, (4, 32), WEIGHT_FORMATS[weights])
    return {parameter.name: parameter.layout for parameter in net.parallel_report.parameters}


@pytest.mark.parametrize(("family", "size"), MODELS)
def test_bytes_scales_and_zero_points_follow_their_matrix(family, size):
    strategy = load_strategy(CONFIGS / f"{MODELS[family, size]}.yaml", for_inference=True)
    model = dataclasses.replace(size_config(family, size), num_layers=2)
    exact = layouts(family, model, strategy, "float32")
    sharded = {name for name, layout in exact.items() if any(layout or ()) and name.endswith(".weight")}
    for weights in ("int8", "w8a8", "int4-asym-g32"):
        found, compared = layouts(family, model, strategy, weights), 0
        for name in sharded:
            path = name.removesuffix(".weight")
            if (scale := found.get(f"{path}.scale")) is None:
                continue  # it stays as it is
            *experts, rows, columns = exact[name]
            if f"{path}.zero" in found:
                assert found[name] == (*experts, rows, columns, ())
                assert scale == found[f"{path}.zero"] == (*experts, rows, columns)
            else:
                assert found[name] == exact[name]
                assert {axis for dim in scale for axis in dim} == {axis for dim in (*experts, rows) for axis in dim}
            compared += 1
        assert compared >= 8, weights
