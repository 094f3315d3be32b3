# SPDX-License-Identifier: Apache-2.0
"""Muon equals its formula in float64 and float32, and on every mesh one device, although matrices are sharded there."""

import json

import mindspore as ms
import numpy as np
import pytest
from conftest import CONFIGS, call, shared
from mindspore import Parameter, Tensor, ops

from sporeloom.checkpoint.contents import is_orthogonalized
from sporeloom.strategy.loader import load_strategy
from sporeloom.train.muon import ITERATIONS, Muon, RowSplit, size_factor

WORKER = "tests/parity/worker.py"


@pytest.fixture(scope="module")
def case():
    folder = shared("golden_v3/muon/case_a")
    return json.loads((folder / "config.json").read_text()), dict(np.load(folder / "golden.npz"))


def trained(case, variant, names, dtype, num_steps=10):
    """An optimizer after some steps of a variant; yields its parameters after each of them."""
    config, golden = case
    parameters = [Parameter(Tensor(golden[f"param0.{name}"].astype(dtype)), name=name) for name in names]
    splits = {name: RowSplit(split["kind"], tuple(split["parts"])) for name, split in config["split"].items()}
    optimizer = Muon(
        parameters,
        lambda name, shape: config["optimizer"][name] == "muon",
        momentum=config["momentum"],
        nesterov=variant["nesterov"],
        phases=tuple((tuple(numbers), count) for numbers, count in variant["schedule"]),
        epsilon=config["eps"],
        weight_decay=config["weight_decay"],
        splits=splits if variant["split"] else {},
        adam_rate_factor=config["adam"]["lr_factor"],
        beta1=config["adam"]["betas"][0],
        beta2=config["adam"]["betas"][1],
        adam_epsilon=config["adam"]["eps"],
    )
    for step in range(num_steps):
        optimizer.prepare(step + 1, config["lr"][step])
        optimizer(ms.mutable(tuple(Tensor(golden[f"gradient.{name}"][step].astype(dtype)) for name in names)))
        yield step + 1, optimizer


@pytest.mark.parametrize(
    ("number", "dtype", "num_steps", "atol"),
    [(0, np.float32, 10, 1e-6), (2, np.float64, 10, 1e-9), (3, np.float64, 2, 1e-9)],
)
def test_updates_equal_the_golden_ones(case, number, dtype, num_steps, atol):
    # Floats in graphs have 32 bits, and operators outside of them take many times as long.
    ms.set_context(mode=ms.GRAPH_MODE if dtype == np.float32 else ms.PYNATIVE_MODE)
    config, golden = case
    variant = config["variants"][number]
    names = [name for name in config["params"] if variant["split"] or name in config["split"]]
    if dtype == np.float64:  # AdamW's operator has float32 alone
        names = [name for name in names if config["optimizer"][name] == "muon"]
    compared = 0
    for step, optimizer in trained(case, variant, names, dtype, num_steps):
        for parameter in optimizer.parameters:
            expected = golden.get(f"{variant['name']}.after_{step}.{parameter.name}")
            if expected is not None:
                np.testing.assert_allclose(parameter.asnumpy(), expected, rtol=0, atol=atol)
                compared += 1
    assert compared >= 2 * len(names)
    for state in optimizer.momenta if num_steps == 10 else ():
        expected = golden[f"{variant['name']}.state_m_after_10.{state.name.removeprefix('adam_m.')}"]
        np.testing.assert_allclose(state.asnumpy(), expected, rtol=1e-6, atol=atol)


def test_a_step_with_gradients_that_were_not_finite_changes_nothing(case):
    ms.set_context(mode=ms.GRAPH_MODE)
    config, _ = case
    names = ["square.weight", "norm.weight"]
    (_, optimizer), *_ = trained(case, config["variants"][0], names, np.float32, 1)
    states = [*optimizer.parameters, *optimizer.momenta]
    before = [state.asnumpy().copy() for state in states]
    zeros = tuple(ops.zeros_like(parameter) for parameter in optimizer.parameters)
    optimizer.prepare(2, 0.01)
    optimizer(zeros, Tensor(True))
    for state, value in zip(states, before, strict=True):
        np.testing.assert_array_equal(state.asnumpy(), value)


def test_sizes_of_updates_and_parts_of_rows():
    assert size_factor("spectral", 0.2, 9, 4) == pytest.approx(0.6)
    assert [size_factor("shape", 1.0, 9, 4), size_factor("shape", 1.0, 4, 9)] == [1.5, 1.0]
    assert size_factor("unit-rms", 1.0, 4, 9) == pytest.approx(2 / 3)
    assert [count for _, count in ITERATIONS["two-phase"]] == [8, 2]
    RowSplit("periodic", (2, 1)).check("qkv", 9)
    for split, rows in (
        (RowSplit("periodic", (2, 1)), 8),
        (RowSplit("blocks", (2, 1)), 9),
        (RowSplit("blocks", ()), 0),
    ):
        with pytest.raises(ValueError, match=r"qkv: .* rows are not made of"):
            split.check("qkv", rows)
    names = ["embedding.word.weight", "head.weight", "final_norm.weight", "layers.0.mlp.experts.up.bias"]
    assert not any(is_orthogonalized(name, (4, 1, 6)) for name in names)
    assert is_orthogonalized("model.layers.0.attention.query.weight", (4, 6))
    assert is_orthogonalized("layers.0.mlp.experts.up.weight", (4, 6, 3))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    out = tmp_path_factory.mktemp("muon") / "one"
    call(WORKER, "train_optimizer", "one_device", ["codegeex4", "muon"], out)
    return json.loads(out.with_suffix(".json").read_text()), np.load(out.with_suffix(".npz"))


@pytest.mark.slow
def test_a_mesh_equals_one_device(expected, tmp_path):
    """A pipeline; optimizer parallel, with accumulation: see test_qk_clip_on_meshes."""
    path, out = CONFIGS / "pangu_tiny_tp2_pp2.yaml", tmp_path / "mesh"
    call(WORKER, "train_optimizer", path, ["codegeex4", "muon"], out, processes=load_strategy(path).mesh.size)
    losses, weights = expected
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(json.loads(out.with_suffix(".json").read_text()), losses, rtol=1e-5)
    found = np.load(out.with_suffix(".npz"))
    assert set(found.files) == set(weights.files)
    for key in weights.files:
        np.testing.assert_allclose(found[key], weights[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.slow
def test_with_bfloat16_states_a_mesh_equals_one_device(expected, tmp_path):
    """Muon's momentum and the moments of its AdamW: the random numbers of their rounding do not depend on the mesh."""
    found = {}
    for name in ("one_device", "dp2_tp2_zero"):
        path, out = CONFIGS / f"pangu_tiny_{name}.yaml", tmp_path / name
        where = {} if name == "one_device" else {"processes": load_strategy(path).mesh.size}
        call(WORKER, "train_optimizer", path if where else name, ["codegeex4", "muon", "narrow"], out, **where)
        found[name] = json.loads(out.with_suffix(".json").read_text()), np.load(out.with_suffix(".npz"))
    (losses, weights), (other_losses, other) = found.values()
    np.testing.assert_allclose(losses, expected[0], rtol=1e-3)
    assert any(np.any(weights[key] != expected[1][key]) for key in weights.files)
    np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
    for (
        key
    ) in weights.files:  # the last bit of a gradient may decide how a state is rounded, in one of a thousand entries
        apart, rounding = (np.sqrt(((weights[key] - from_[key]) ** 2).mean()) for from_ in (other, expected[1]))
        assert apart <= 0.2 * rounding, (key, apart, rounding)  # other random numbers: 1.4
