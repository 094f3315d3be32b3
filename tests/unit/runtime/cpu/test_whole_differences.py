# SPDX-License-Identifier: Apache-2.0
"""Values of other meshes are put together from the parts of ranks, and the first that differs is told with its rank."""

from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.cpu.reference import as_step, read_reference
from sporeloom.runtime.cpu.whole_differences import Equal, compared, first_difference_of_wholes
from sporeloom.runtime.cpu.whole_values import WholeStep, WholeValue
from sporeloom.runtime.spmd.value_shards import ValueShard

X = np.arange(1, 9, dtype=np.float32).reshape(4, 2)


def value(parts, shape=X.shape, place="MatMul of up, forward", order=0):
    """Parts: (rank, microbatch, first entry, numbers, number of the summand or None)."""
    made = WholeValue(place, "node", order)
    for rank, microbatch, start, array, summand in parts:
        shard = ValueShard("up", "node", place, 0, shape, start, array.shape, summand or 0, summand is not None)
        made.add(rank, microbatch, array, shard)
    return made


def whole(array, place="MatMul of up, forward", order=0):
    return value([(0, 0, (0,) * array.ndim, array, None)], array.shape, place, order)


def step(**values):
    return WholeStep(computed=values)


def changed(array, at, to):
    array = array.copy()
    array[at] = to
    return array


ROWS = [(0, 0, (0, 0), X[:2], None), (1, 0, (2, 0), X[2:], None)]
SAME = {
    "rows": value(ROWS),
    "replicas": value([*ROWS, (2, 0, (0, 0), X[:2], None), (3, 0, (2, 0), X[2:], None)]),
    "summands": value([(0, 0, (0, 0), X - 1, 0), (1, 0, (0, 0), X - X + 1, 1), (2, 0, (0, 0), X - 1, 0)]),
    "microbatches": value([(0, 0, (0, 0), X[:2], None), (0, 1, (0, 0), X[2:], None)], (2, 2)),
    "gradients of microbatches": value([(0, 0, (0, 0), X - 3, None), (0, 1, (0, 0), X - X + 3, None)]),
    "a constant in each microbatch": value([(0, 0, (0, 0), X, None), (0, 1, (0, 0), X, None)]),
    "rounding": whole(X * np.float32(1 + 1e-6)),
}


@pytest.mark.parametrize("how", SAME)
def test_the_same_value_in_other_parts_is_equal(how):
    for pair in ((step(up=whole(X)), step(up=SAME[how])), (step(up=SAME[how]), step(up=whole(X)))):
        assert compared(*pair, 1e-4) == Equal(0, 1, 0)


WRONG = changed(X, (2, 1), 7.0)
DIFFERENT = {
    "a shard": (value([ROWS[0], (1, 0, (2, 0), WRONG[2:], None)]), "rank 1 of b (rank 0 of a): MatMul of up"),
    "a replica": (
        value([*ROWS, (3, 0, (2, 0), WRONG[2:], None)]),
        "rank 3 of b: MatMul of up, forward, tensor node, of which other",
    ),
    "the first of replicas": (
        value([ROWS[0], (1, 0, (2, 0), WRONG[2:], None), (3, 0, (2, 0), X[2:], None)]),
        "rank 1 of b (rank 0 of a): MatMul of up",
    ),
    "a summand": (value([(0, 0, (0, 0), WRONG, 0), (1, 0, (0, 0), X - X, 1)]), "ranks 0, 1 of b (rank 0 of a)"),
    "a sum taken twice": (value([(0, 0, (0, 0), 2 * X, 0)]), "at [3, 1] 16 instead of 8"),
    "a microbatch": (
        value([(0, 0, (0, 0), X[:2], None), (0, 1, (0, 0), WRONG[2:], None)], (2, 2)),
        "rank 0 of b (rank 0 of a): MatMul of up, forward, tensor node, at [2, 1] 7 instead of 6",
    ),
    "no number": (whole(changed(X, (2, 1), np.nan)), "at [2, 1] nan instead of 6"),
}


@pytest.mark.parametrize("how", DIFFERENT)
def test_the_rank_with_the_wrong_part_is_told(how):
    other, told = DIFFERENT[how]
    assert told in compared(step(up=whole(X)), step(up=other), 1e-4)


def test_the_first_difference_in_the_order_of_the_graph_is_told():
    one = step(a=whole(X, "Add of down, forward", 2), b=whole(X, order=1), c=whole(X, "Mul of x, forward", 0))
    other = step(a=whole(WRONG, "Add of down, forward"), b=whole(WRONG), c=whole(X))
    assert "MatMul of up, forward" in compared(one, other, 1e-4)


def test_a_gradient_that_is_zero_but_for_rounding_is_equal_and_tokens_are_compared_exactly():
    big, tiny = whole(1e3 * X, "MatMul of up, backward"), "ReduceSum of key, backward"
    rounding = [step(big=big, tiny=whole(factor * X, tiny)) for factor in (1e-6, -1e-6)]
    assert compared(*rounding, 1e-4) == Equal(0, 2, 0)
    tokens = [step(tokens=whole(np.array([10**6, last]), "input 0")) for last in (8, 9)]
    assert "input 0, tensor node, at [1] 9 instead of 8" in compared(*tokens, 1e-4)


def parameters(**values):
    named = {name.replace("__", "."): array for name, array in values.items()}
    steps = {name: whole(array, f"parameter {name} before the step") for name, array in named.items()}
    for name, each in steps.items():
        each.name = name
    return WholeStep(steps)


@pytest.mark.parametrize(
    ("wrong", "squares", "differs"),
    [
        (changed(X, (2, 1), 7.0), X, True),
        (changed(X, (2, 1), 6.0003), X, False),  # a direction determined by rounding, some time ago
        (X * np.float32(1.001), X, True),
        (changed(X, (2, 1), 7.0), changed(X, (2, 1), 1e-7), False),
    ],
)
def test_a_weight_may_drift_where_adam_follows_rounding(wrong, squares, differs):
    one, other = (parameters(model__w=each, adam_v__model__w=squares) for each in (X, wrong))
    found = compared(one, other, 1e-4)
    assert "parameter model.w before the step" in found if differs else found == Equal(2, 0, 0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"w": X[:3]}, r"b: parameter w is \[3, 2\], in a \[4, 2\]; give two runs of one network"),
        ({"v": X}, "has no parameter v, b has it"),
    ],
)
def test_runs_of_other_networks_are_refused(monkeypatch, other, told):
    steps = {"a": parameters(w=X), "b": parameters(**other)}
    monkeypatch.setattr(WholeStep, "of", lambda recording, step: steps[recording.run])
    with pytest.raises(ConfigError, match=told):
        first_difference_of_wholes(*(SimpleNamespace(run=name) for name in steps), 1, 1e-4)


def test_a_mask_of_large_numbers_hides_nothing():
    mask, up, down = whole(-1e6 * X, "Sub of mask, forward"), whole(X), whole(1e-3 * X, "Mul of down, forward")
    wrong = step(mask=mask, up=whole(WRONG), down=down)
    assert "MatMul of up" in compared(step(mask=mask, up=up, down=down), wrong, 1e-4)


def test_values_of_one_side_alone_or_of_another_shape_are_counted():
    assert compared(step(up=whole(X), x=whole(X)), step(up=whole(X), y=whole(X[:3])), 1e-4) == Equal(0, 1, 2)
    assert compared(step(up=whole(X)), step(up=whole(X[:3])), 1e-4) == Equal(0, 0, 1)


@pytest.fixture
def own():
    parts = [(0, 0, (0, 0), X[:2], None), (0, 1, (0, 0), X[2:], None)]
    bias = WholeValue("parameter mlp.up.bias before the step", "mlp.up.bias", parts=[X[0]], owners=[])
    return WholeStep(
        {"mlp.up.bias": bias},
        {
            "1": value(parts, (2, 2), "MatMul of mlp.up, forward", 1),
            "2": value(parts, (2, 2), "Add of mlp.up, forward", 2),
            "3": value(parts, (2, 2), "Add of mlp.up, backward", 3),
        },
    )


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_reference_is_compared_with_what_cells_return(own, tmp_path, suffix):
    path = tmp_path / f"dump.{suffix}"
    for array, told in ((X, None), (WRONG, "rank 0 of a: Add of mlp.up, forward, tensor node, at [1, 0, 1] 7 instead")):
        tensors = {"before/mlp.up.bias": X[0], "forward/mlp.up": array.reshape(2, 2, 2), "forward/mlp": array}
        save_file(tensors, path) if suffix == "safetensors" else np.savez(path, **tensors)
        found = compared(own, as_step(read_reference(path), own, path), 1e-4)
        assert told in found if told else found == Equal(1, 1, 2)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "has no tensors"),
        ({"forward/mlp.upp": X}, "tensor forward/mlp.upp: is of no parameter or Cell of the run; did you mean mlp.up?"),
        ({"mlp.up": X}, "tensor mlp.up: is of no parameter or Cell of the run"),
        ({"forward/mlp": X[:3]}, "its shape is [3, 2], the run has 2 x [2, 2]"),
    ],
)
def test_a_tensor_of_nothing_in_the_run_is_refused(own, tmp_path, tensors, told):
    with pytest.raises(ConfigError) as caught:
        as_step(tensors, own, tmp_path / "dump.npz")
    assert told in str(caught.value)


def test_a_file_that_is_no_reference_is_refused(tmp_path):
    for name in ("a.npz", "a.safetensors"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(ConfigError, match="cannot be read as tensors"):
            read_reference(tmp_path / name)
