# SPDX-License-Identifier: Apache-2.0
import pytest

from sporeloom.models.paths import alternatives, path_matches


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("up.matmul", "layers.0.mlp.up.matmul", True),
        ("up.matmul", "layers.0.mlp.setup.matmul", False),
        ("attention.*.matmul", "attention.key.matmul", True),
        ("attention.*.matmul", "attention.cache.key.matmul", False),
        ("up|gate.matmul", "mlp.gate.matmul", True),
        ("up|gate.matmul", "mlp.up.matmul", True),
        ("up|gate.matmul", "mlp.down.matmul", False),
        ("up|gate.matmul", "mlp.up", False),
        ("cache.pick_*|row", "cache.pick_key", True),
        ("key|value.bias_add|rescale", "attention.value.rescale", True),
    ],
)
def test_a_pattern_is_the_end_of_a_path(pattern, path, matches):
    assert path_matches(pattern, path) is matches


def test_either_stands_for_two_patterns():
    assert alternatives("key|value.bias_add|rescale") == [
        "key.bias_add",
        "key.rescale",
        "value.bias_add",
        "value.rescale",
    ]
