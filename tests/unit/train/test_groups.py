# SPDX-License-Identifier: Apache-2.0
"""Parameter groups: what patterns choose, what is refused, and that a parameter is updated as with its settings alone."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from sporeloom.certification.training import decoder_batches
from sporeloom.checkpoint.contents import is_orthogonalized
from sporeloom.core.errors import ConfigError
from sporeloom.models.family import family_module, size_config
from sporeloom.nn.routing import freeze_balance_biases
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.step import TrainStep
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.train.adafactor import Adafactor
from sporeloom.train.checks import check
from sporeloom.train.groups import ParameterGroup, ParameterGroups, Scales, read_groups
from sporeloom.train.muon import Muon
from sporeloom.train.optim import SGD, AdamW
from sporeloom.train.plain_text import TrainConfig

NAMES = ("embedding.word.weight", "layers.0.query.weight", "layers.0.query.bias", "final_norm.weight")
RATE, DECAY = 0.01, 0.1


def test_a_later_group_takes_precedence_setting_by_setting(write):
    path = write(
        "groups.yaml",
        """parameter_groups:
  - {match: "*", weight_decay: 0.5}
  - {match: "layers.*", freeze: true}
  - {match: "*.bias", weight_decay: 0, freeze: false}
""",
    )
    groups = read_groups(path, NAMES)
    assert groups.frozen_names == ["layers.0.query.weight"]
    assert groups.scales(NAMES) == Scales((1.0,) * 4, (0.5, 0.5, 0.0, 0.5))
    assert groups.settings()[2] == {"match": "*.bias", "weight_decay": 0, "freeze": False}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{match: layer.0.*, freeze: true}", "groups.yaml:2: layer.0.* matches no trained parameter"),
        ("{match: '*.bias', freeze: true, weight_decay: 0}", "*.bias is frozen, so weight_decay has no effect"),
        ("{match: '*.bias'}", "*.bias changes nothing; give learning_rate_factor, weight_decay or freeze"),
        ("{match: '*', freeze: true}", "all parameters are frozen"),
        ("{match: '*', learning_rate_factor: 0}", "must be above 0"),
        ("{match: '*', weight_decay: -1}", "must be at least 0"),
        ("{match: '*', rate: 1}", "rate is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused(write, entry, told):
    with pytest.raises(ConfigError) as caught:
        read_groups(write("groups.yaml", f"parameter_groups:\n  - {entry}\n"), NAMES)
    assert told in str(caught.value)


def test_a_run_refuses_groups_that_its_optimizer_or_model_has_not(write):
    groups = write("groups.yaml", "parameter_groups:\n  - {match: layers.7.*, freeze: true}\n")
    flags = {"data": write("a.txt", "text"), "parameter_groups": groups}
    with pytest.raises(ConfigError, match=r"layers\.7\.\* matches no trained parameter"):
        check(TrainConfig(**flags), num_processes=1)
    groups.write_text("parameter_groups:\n  - {match: layers.1.*, freeze: true}\n")
    with pytest.raises(ConfigError, match="--optimizer sgd has none"):
        check(TrainConfig(**flags, optimizer="sgd"), num_processes=1)
    run = check(TrainConfig(**flags), num_processes=1)
    assert run.groups and all(name.startswith("layers.1.") for name in run.groups.frozen_names)


def built(kind, parameters, weight_decay, scales=None):
    if kind == "muon":
        return Muon(parameters, is_orthogonalized, weight_decay=weight_decay, scales=scales)
    if kind.startswith("adafactor"):
        factored = kind == "adafactor-factored"
        return Adafactor(parameters, factored=factored, weight_decay=weight_decay, scales=scales)
    return AdamW(parameters, weight_decay=weight_decay, bias_correction=True, scales=scales)


def updated(kind, values, gradients, weight_decay, rate, scales=None):
    """Values after some updates."""
    parameters = [Parameter(Tensor(value), name=name) for name, value in values.items()]
    optimizer = built(kind, parameters, weight_decay, scales)
    for step, given in enumerate(gradients, 1):
        optimizer.prepare(step, rate)
        optimizer(tuple(Tensor(given[name]) for name in values))
    return {parameter.name: parameter.asnumpy() for parameter in parameters}


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "adafactor-factored", "muon"])
def test_a_parameter_is_updated_as_with_its_settings_alone(kind):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    rng = np.random.RandomState(0)
    shapes = dict(zip(NAMES, [(6, 4), (4, 4), (4,), (4,)], strict=True))
    values = {name: rng.randn(*shape).astype(np.float32) for name, shape in shapes.items()}
    gradients = [{name: rng.randn(*shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(3)]
    groups = ParameterGroups(
        (
            ParameterGroup("embedding.*", learning_rate_factor=0.1),
            ParameterGroup("*.query.*", weight_decay=0.7),
            ParameterGroup("*.weight", learning_rate_factor=3.0),
            ParameterGroup("embedding.*", learning_rate_factor=0.25),
        ),
        NAMES,
    )
    found = updated(kind, values, gradients, DECAY, RATE, groups.scales(NAMES))
    own = {NAMES[0]: (0.25, DECAY), NAMES[1]: (3.0, 0.7), NAMES[2]: (1.0, 0.7), NAMES[3]: (3.0, DECAY)}
    for name, (factor, decay) in own.items():
        if kind in ("adamw", "muon") and name == NAMES[2]:  # AdamW decays a bias where a group says so
            alone = updated(
                kind,
                {"layers.0.weight_of_a_vector": values[name]},
                [{"layers.0.weight_of_a_vector": given[name]} for given in gradients],
                decay,
                RATE * factor,
            )["layers.0.weight_of_a_vector"]
        else:
            alone = updated(kind, {name: values[name]}, gradients, decay, RATE * factor)[name]
        np.testing.assert_allclose(found[name], alone, rtol=2e-6, atol=1e-7, err_msg=name)
        assert np.abs(found[name] - values[name]).max() > 1e-4


def test_a_step_with_an_overflow_changes_nothing():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    scales = Scales((2.0, 1.0), (0.3, None))
    for kind in ("adamw", "muon"):
        parameters = [Parameter(Tensor(np.ones((2, 2), np.float32)), name=name) for name in NAMES[:2]]
        optimizer = built(kind, parameters, DECAY, scales)
        optimizer.prepare(1, RATE)
        optimizer(tuple(Tensor(np.zeros((2, 2), np.float32)) for _ in parameters), Tensor(True))
        assert all((parameter.asnumpy() == 1).all() for parameter in parameters)


def test_a_frozen_router_keeps_its_balance_bias():
    """The next layer's moves by that layer's own counts."""
    experts = {"num_experts": 4, "experts_per_token": 2, "normalize": "before_drop", "balance_bias_rate": 0.1}
    small = {"num_layers": 3, "hidden_size": 32, "num_heads": 2, "vocab_size": 64, "seq_len": 16, "dropout_rate": 0.0}
    config = dataclasses.replace(size_config("pangu", "tiny"), **small, experts={**experts, "ffn_hidden_size": 32})
    net = family_module("pangu", "model").ModelWithLoss(config)
    net.model.layers[0].mlp.router.weight.requires_grad = False
    freeze_balance_biases(net, of_frozen=True)
    report, optimizer = parallelize(net, SINGLE_DEVICE), SGD(net.trainable_params())
    optimizer.prepare(1, 0.1)
    *_, counts = TrainStep(net, optimizer, report, 0).set_train()(*next(iter(decoder_batches(config, 4))))
    first, second = (layer.mlp.choices.balance_bias.asnumpy() for layer in net.model.layers[:2])
    loads = counts.asnumpy().reshape(2, -1)[1, :4]
    np.testing.assert_array_equal(first, 0.0)
    np.testing.assert_allclose(second, 0.1 * np.sign(loads.mean() - loads), rtol=1e-6)
    assert second.any()
