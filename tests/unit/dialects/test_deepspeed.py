# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configurations: every key is read or named."""

import json

import pytest
from conftest import CONFIGS

from sporeloom.dialects import Settings, recognize, translate
from sporeloom.dialects.deepspeed import as_ranges
from sporeloom.errors import ConfigError
from sporeloom.strategy.config import SINGLE_DEVICE, Offload, OptimizerParallel
from sporeloom.strategy.mesh import Mesh

RULES = CONFIGS / "rules" / "decoder.yaml"
PUBLISHED = {  # the keys of DeepSpeed's own examples of random-LTD and MT-NLG's precision
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1.2e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 5000}},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 11, "hysteresis": 2},
    "data_efficiency": {
        "enabled": True,
        "seed": 1234,
        "data_routing": {
            "enabled": True,
            "random_ltd": {
                "enabled": True,
                "total_layer_num": 24,
                "random_ltd_layer_num": 22,
                "random_ltd_layer_id": list(range(1, 23)),
                "model_mask_name": "attention_mask",
                "model_type": "decoder",
                "hidden_state_order": "seq_batch_dim",
                "random_ltd_schedule": {
                    "min_value": 128,
                    "max_value": 2048,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": 200000, "seq_per_step": 16},
                },
            },
        },
    },
}


def read(write, values, **known):
    path = write("ds_config.json", json.dumps(values, indent=2))
    assert recognize(path) == "deepspeed"
    return translate(path, "ours", RULES, path.parent / "mine.yaml", Settings(SINGLE_DEVICE, known), 64)


def test_a_published_configuration_is_read_and_nothing_is_unknown(write):
    done = read(write, PUBLISHED, seq_len=2048)
    assert done.settings.strategy.mesh == Mesh(dp=64)
    assert done.settings.strategy.optimizer_parallel == OptimizerParallel()
    assert done.settings.num_layers == 24
    assert done.settings.train == {
        **{"seq_len": 2048, "batch_size": 256, "max_grad_norm": 1.0, "seed": 1234},
        **{"learning_rate": 1.2e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.1},
        **{"warmup_steps": 100, "decay_steps": 5000},
        **{"compute_dtype": "float16", "loss_scale": 2.0**11, "loss_scale_window": 500},
        **{"random_ltd_min_value": 128, "random_ltd_require_steps": 200000, "random_ltd_seq_per_step": 16},
        "random_ltd_layers": ("1-22",),
    }
    assert "--random-ltd-layers 1-22" in done.text
    assert {note.key for note in done.losses} == {"zero_optimization.stage"}
    given = set()

    def collect(prefix, values):
        for name, value in values.items():
            if isinstance(value, dict):
                collect(f"{prefix}{name}.", value)
            else:
                given.add(prefix + name)

    collect("", PUBLISHED)
    assert given == {note.key for note in done.notes}


def test_an_optimizer_that_waits_on_the_host_is_offloaded_here_too(write):
    done = read(write, {"train_batch_size": 64, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert done.settings.strategy.offload == Offload(optimizer=True)
    assert "offload: {optimizer: true}" in done.text
    assert not [note for note in done.losses if "offload" in note.key]


def test_what_cannot_be_said_is_named(write):
    values = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "pin_memory": True},
            "offload_param": {"device": "cpu"},
        },
        "bf16": {"enabled": True},
        "scheduler": {"type": "OneCycle"},
        "data_efficiency": {
            "data_sampling": {
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": {"min_difficulty": 1}}}
            },
            "data_routing": {"random_ltd": {"enabled": False, "random_ltd_layer_num": 3}},
        },
        "train_batchsize": 5,
    }
    done = read(write, values)
    assert done.settings.train == {"accumulate": 4, "batch_size": 2 * 4 * 64, "compute_dtype": "bfloat16"}
    fates = {note.key: note.fate for note in done.notes}
    assert fates["zero_optimization.offload_optimizer.device"] == "not expressible"
    assert fates["zero_optimization.offload_optimizer.pin_memory"] == "no effect"
    assert fates["zero_optimization.offload_param.device"] == "not expressible"
    assert fates["scheduler.type"] == "not expressible"
    assert fates["data_efficiency.data_routing.random_ltd.random_ltd_layer_num"] == "no effect"
    assert fates["train_batchsize"] == "unknown"
    curriculum = [key for key in fates if "curriculum" in key]
    assert len(curriculum) == 2
    assert {fates[key] for key in curriculum} == {"not expressible"}


def test_devices_and_numbers_are_needed(write):
    path = write("c.json", '{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match="give --devices"):
        translate(path, "ours", RULES, path.parent / "m.yaml", Settings(SINGLE_DEVICE))
    with pytest.raises(ConfigError, match="train_batch_size must be a number, got 'auto'"):
        read(write, {"train_batch_size": "auto"})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"optimizer": {"params": {"betas": "auto"}}}, "betas must be two numbers, got 'auto'"),
        ({"fp16": {"initial_scale_power": "auto"}}, "fp16.initial_scale_power must be a number, got 'auto'"),
        ({"fp16": {"loss_scale": "auto"}}, "fp16.loss_scale must be a number, got 'auto'"),
        ({"zero_optimization": {"stage": "auto"}}, "stage must be 0 to 3, got 'auto'"),
    ],
)
def test_what_a_program_around_it_would_fill_in_is_told(write, values, told):
    with pytest.raises(ConfigError, match=told):
        read(write, values)


def test_a_precision_that_is_left_open_is_none(write):
    done = read(write, {"bf16": {"enabled": "auto"}})
    assert "compute_dtype" not in done.settings.train
    assert [(note.key, note.fate) for note in done.losses] == [("bf16.enabled", "not expressible")]


def test_layers_are_named_by_ranges():
    assert as_ranges([3, 1, 2, 7, 9, 10]) == ["1-3", "7", "9-10"]
    assert as_ranges([]) == []
