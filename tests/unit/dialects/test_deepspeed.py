# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configurations: every key is read or named."""

import json

import pytest
from conftest import CONFIGS

from sporeloom.core.errors import ConfigError
from sporeloom.dialects import Settings, recognize, translate
from sporeloom.dialects.stages import as_ranges
from sporeloom.strategy.config import SINGLE_DEVICE, Offload, OptimizerParallel
from sporeloom.strategy.mesh import Mesh
from sporeloom.train.schedules import learning_rate

RULES = CONFIGS / "rules" / "decoder.yaml"
PUBLISHED = {  # the keys of DeepSpeed's own examples of random-LTD and MT-NLG's precision
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1.2e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 1.2e-4, "warmup_num_steps": 100, "total_num_steps": 5000, "warmup_type": "linear"},
    },
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
        **{
            "warmup_steps": 100,
            "decay_steps": 5000,
            "min_learning_rate": 0.0,
            "schedule": "cosine",
            "optimizer": "adamw",
        },
        **{"compute_dtype": "float16", "loss_scale": 2.0**11, "loss_scale_window": 500},
        **{"random_ltd_min_value": 128, "random_ltd_require_steps": 200000, "random_ltd_seq_per_step": 16},
        "random_ltd_layers": ("1-22",),
    }
    assert "--random-ltd-layers 1-22" in done.text
    assert {note.key for note in done.losses} == {"zero_optimization.stage", "scheduler.type"}  # a line is no cosine
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


def flags_of(values, write, **known):
    return read(write, values, **known).settings.train


SIZES = [  # (the file's sizes, batch_size, accumulate): DeepSpeed's rule, on 64 replicas
    ({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, 256, 2),
    ({"train_batch_size": 512, "gradient_accumulation_steps": 4}, 512, 4),
    ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, 384, 2),
    ({"train_micro_batch_size_per_gpu": 3}, 192, None),
    ({"train_batch_size": 128}, 128, None),
    ({"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}, 1024, 8),
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1}, 64, None),
]


@pytest.mark.parametrize(("sizes", "batch_size", "accumulate"), SIZES)
def test_the_third_size_of_a_batch_follows_from_two(write, sizes, batch_size, accumulate):
    train = flags_of(sizes, write)
    assert (train["batch_size"], train.get("accumulate")) == (batch_size, accumulate)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 64 replicas = 512",
        ),
        ({"train_batch_size": 96}, "train_batch_size 96 is not a multiple of 64 replicas"),
        (
            {"train_batch_size": 192, "train_micro_batch_size_per_gpu": 2},
            "train_batch_size 192 is not a multiple of train_micro_batch_size_per_gpu 2 x 64 replicas",
        ),
        (
            {"train_batch_size": 64, "gradient_accumulation_steps": 2},
            "is not a multiple of gradient_accumulation_steps 2 x 64 replicas",
        ),
        ({"train_batch_size": 0}, "train_batch_size must be a number of at least 1, got 0"),
        ({"train_batch_size": 64.5}, "train_batch_size must be a number of at least 1, got 64.5"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps must be a number of at least 1, got True"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled must be true, false or "auto"'),
        ({"zero_optimization": {"stage": 4}}, "stage must be 0 to 3, got 4"),
        ({"zero_optimization": {"stage": True}}, "stage must be 0 to 3, got True"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "needs zero_optimization.stage 3, got 2",
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "needs zero_optimization.stage 1, 2 or 3",
        ),
        (
            {"zero_optimization": {"stage": 0, "cpu_offload": True}},
            "cpu_offload needs zero_optimization.stage 1, 2 or 3",
        ),
        ({"zero_optimization": {"stage": 0, "mics_shard_size": 8}}, "mics_shard_size needs zero_optimization.stage 3"),
        ({"tensor_parallel": {"autotp_size": 3}}, "--devices 64 is not a multiple of tp 3"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
            "WarmupDecayLR needs scheduler.params.total_num_steps",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 100}}},
            "total_num_steps 50 is below warmup_num_steps 100",
        ),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, "optimizer.params.lr must be a number, got -1"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(write, values, told):
    with pytest.raises(ConfigError, match=told):
        read(write, values)


def test_all_contradictions_are_told_at_once(write):
    values = {
        **{"train_batch_size": 96, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
        **{"zero_optimization": {"stage": 7}, "optimizer": {"type": "Adam", "params": {"eps": "auto"}}},
    }
    with pytest.raises(ConfigError) as raised:
        read(write, values)
    assert len(raised.value.problems) == 4


ADAM = {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0}
"""DeepSpeed's defaults."""


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [
        ({"type": "Adam"}, {**ADAM, "optimizer": "adamw"}),
        ({"type": "AdamW", "params": {"lr": 2e-4}}, {**ADAM, "learning_rate": 2e-4, "optimizer": "adamw"}),
        ({"type": "adam", "params": {"bias_correction": False}}, {**ADAM, "optimizer": "adamw-original"}),
        ({"type": "AdamW", "params": {"betas": [0.8, 0.9]}}, {**ADAM, "adam_beta1": 0.8, "adam_beta2": 0.9}),
        ({"type": "SGD", "params": {"lr": 0.1}}, {"learning_rate": 0.1, "optimizer": "sgd"}),
    ],
)
def test_an_optimizer_is_what_deepspeed_makes_of_it(write, optimizer, given):
    train = flags_of({"optimizer": optimizer}, write)
    assert {name: train[name] for name in given} == given


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        ({"type": "OneBitAdam", "params": {"freeze_step": 2}}, "optimizer.params.freeze_step"),
        ({"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}}, "optimizer.type"),
        ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, "optimizer.params.adam_w_mode"),
        ({"type": "SGD", "params": {"momentum": 0.9}}, "optimizer.params.momentum"),
        ({"type": "Adam", "params": {"amsgrad": True}}, "optimizer.params.amsgrad"),
    ],
)
def test_an_optimizer_we_have_not_is_refused_by_name(write, optimizer, key):
    done = read(write, {"optimizer": optimizer})
    assert {note.key: note.fate for note in done.notes}[key] == "not expressible"


def rate(train, step):
    high, low = train["learning_rate"], train["min_learning_rate"]
    return learning_rate(step, high, low, train["warmup_steps"], train.get("decay_steps", 500), train["schedule"])


@pytest.mark.parametrize("own", [1e-5, 3e-4])
def test_the_rate_of_warmup_lr_is_its_own_and_stays_there(write, own):
    params = {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 100, "warmup_type": "linear"}
    adam = {"type": "Adam", "params": {"lr": own}}
    done = read(write, {"optimizer": adam, "scheduler": {"type": "WarmupLR", "params": params}})
    for step in (1, 50, 99, 100, 101, 300, 500):  # by DeepSpeed's formula
        assert rate(done.settings.train, step) == pytest.approx(3e-4 * min(step / 100, 1), rel=1e-12)
    assert not [note for note in done.losses if note.key.startswith(("scheduler", "optimizer"))]


@pytest.mark.parametrize(
    ("scheduler", "given"),
    [
        (
            {
                "type": "WarmupDecayLR",
                "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": 1000},
            },
            {"learning_rate": 3e-4, "warmup_steps": 10, "decay_steps": 1000, "min_learning_rate": 0.0},
        ),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}},  # the rate and the warm-up by default
            {"learning_rate": 1e-3, "warmup_steps": 1000, "decay_steps": 5000},
        ),
        (
            {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1, "warmup_num_steps": 5, "total_num_steps": 50}},
            {"learning_rate": 2e-5, "min_learning_rate": 2e-6, "warmup_steps": 5, "decay_steps": 50},
        ),
        ({"type": "WarmupLR", "params": {}}, {"learning_rate": 2e-5, "min_learning_rate": 2e-5, "warmup_steps": 1000}),
    ],
)
def test_a_schedule_begins_and_ends_where_deepspeed_has_it(write, scheduler, given):
    done = read(write, {"optimizer": {"type": "Adam", "params": {"lr": 2e-5}}, "scheduler": scheduler})
    train = done.settings.train
    assert {name: train[name] for name in given} == pytest.approx(given)
    fates = {note.key: note.fate for note in done.notes}
    assert fates["scheduler.params.warmup_type"] == "approximated"  # a logarithm, unless it says linear
    assert fates["scheduler.type"] == ("renamed" if scheduler["type"] == "WarmupLR" else "approximated")


AUTO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    **{"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        **{"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "stage3_param_persistence_threshold": "auto",
    },
}
FILLING = {
    **{"batch_size": 256, "accumulate": 2, "max_grad_norm": 0.5, "compute_dtype": "bfloat16", "learning_rate": 5e-5},
    **{"adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-7, "weight_decay": 0.01},
    **{"warmup_steps": 20, "steps": 400},
}


def test_flags_fill_in_what_the_trainer_would(write):
    done = read(write, AUTO, **FILLING)
    made = {"optimizer": "adamw", "schedule": "cosine", "decay_steps": 400, "min_learning_rate": 0.0}
    assert done.settings.train == {**FILLING, **made}
    assert not [note for note in done.notes if note.fate in ("unknown", "not expressible")]


def test_what_no_flag_fills_in_is_asked_for_all_at_once(write):
    with pytest.raises(ConfigError) as raised:
        read(write, AUTO)
    asked = " ".join(raised.value.problems)
    wanted = set(FILLING) - {"compute_dtype"}
    assert all(f"--{name.replace('_', '-')}" in asked for name in wanted)
    assert all("which the Hugging Face trainer fills in; give --" in problem for problem in raised.value.problems)


@pytest.mark.parametrize("missing", sorted(set(FILLING) - {"compute_dtype"}))
def test_each_flag_is_asked_for_by_its_name(write, missing):
    with pytest.raises(ConfigError, match=f"give (--.* )?--{missing.replace('_', '-')}"):
        read(write, AUTO, **{name: value for name, value in FILLING.items() if name != missing})


@pytest.mark.parametrize(
    ("values", "flags", "told"),
    [
        ({"train_batch_size": 64}, {"batch_size": 128}, "train_batch_size is 64, but --batch-size is 128"),
        (
            {"gradient_accumulation_steps": 2, "train_batch_size": 128},
            {"accumulate": 4},
            "gradient_accumulation_steps is 2, but --accumulate is 4",
        ),
        (
            {"fp16": {"enabled": True}},
            {"compute_dtype": "bfloat16"},
            "fp16 is enabled, but --compute-dtype is bfloat16",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}},
            {"learning_rate": 1e-3},
            "0.0001.*--learning-rate is 0.001",
        ),
        ({"gradient_clipping": 1.0}, {"max_grad_norm": 2.0}, "gradient_clipping is 1.0, but --max-grad-norm is 2.0"),
    ],
)
def test_a_flag_does_not_contradict_the_file(write, values, flags, told):
    with pytest.raises(ConfigError, match=told):
        read(write, values, **flags)


def test_a_scale_of_fp16_that_is_off_is_not_taken(write):
    train = flags_of({"train_batch_size": 64, "fp16": {"enabled": False, "loss_scale": 128}}, write)
    assert "loss_scale" not in train
    assert flags_of({"fp16": {"enabled": True}}, write)["loss_scale"] == 2.0**16  # DeepSpeed's default, not ours


@pytest.mark.parametrize(
    ("values", "mesh", "method"),
    [
        ({"tensor_parallel": {"autotp_size": 4}}, Mesh(dp=16, tp=4), "gather"),
        ({"sequence_parallel_size": 8}, Mesh(dp=8, cp=8), "ulysses"),
        ({}, Mesh(dp=64), "gather"),
    ],
)
def test_degrees_that_deepspeed_knows_are_axes(write, values, mesh, method):
    done = read(write, {**values, "train_micro_batch_size_per_gpu": 2})
    assert done.settings.strategy.mesh == mesh
    assert done.settings.strategy.context_parallel == method
    assert done.settings.train["batch_size"] == 2 * mesh.dp


EVERY_SECTION = {
    **{"amp": {"enabled": True}, "torch_autocast": {"enabled": True}, "progressive_layer_drop": {"enabled": True}},
    **{
        "eigenvalue": {"enabled": True},
        "elasticity": {"enabled": True, "max_gpus": 8},
        "quantize_training": {"enabled": True},
    },
    **{"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
    **{"sparse_attention": {"mode": "fixed"}, "activation_checkpointing": {"partition_activations": True}},
    **{"curriculum_learning": {"enabled": True}, "pipeline": {"stages": 2}, "expert_parallel": {"autoep_size": 2}},
    **{"gradient_allreduce_op": "sum", "csv_monitor": {"enabled": True}, "wandb": {"enabled": True}},
    **{"bf16": {"bf16_master_weights_and_grads": True}, "comet": {"enabled": True}},
    "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zenflow": {"topk_ratio": 0.1}},
}
NOTHING_HERE = {
    **{
        "steps_per_print": 1,
        "memory_breakdown": True,
        "dump_state": True,
        "sparse_gradients": True,
        "aio": {"thread_count": 1},
    },
    **{"checkpoint": {"tag_validation": "Warn"}, "autotuning": {"enabled": True}, "compile": {"deepcompile": True}},
    **{"gradient_predivide_factor": 2.0, "prescale_gradients": True, "data_types": {"grad_accum_dtype": "fp32"}},
    **{"zero_optimization": {"stage": 1, "overlap_comm": True, "sub_group_size": 1e9, "round_robin_gradients": True}},
    **{"wandb": {"enabled": False, "team": "x"}, "curriculum_learning": {"enabled": False, "min_difficulty": 8}},
}


def keys_of(values, prefix=""):
    for name, value in values.items():
        yield from keys_of(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]


def test_every_key_is_refused_by_name_or_said_to_change_nothing(write):
    done = read(write, EVERY_SECTION)
    fates = {note.key: note.fate for note in done.notes}
    assert [key for key in keys_of(EVERY_SECTION) if fates[key] != "not expressible"] == ["zero_optimization.stage"]
    done = read(write, NOTHING_HERE)
    fates = {note.key: note.fate for note in done.notes}
    read_keys = {"zero_optimization.stage": "approximated", "data_types.grad_accum_dtype": "same"}
    assert fates == {**dict.fromkeys(keys_of(NOTHING_HERE), "no effect"), **read_keys}


def test_a_key_that_deepspeed_has_not_is_unknown(write):
    done = read(write, {"zero_optimization": {"stage": 1, "overlap_com": True}, "optimiser": {"type": "Adam"}})
    unknown = {note.key: note.text for note in done.notes if note.fate == "unknown"}
    assert set(unknown) == {"zero_optimization.overlap_com", "optimiser.type"}
    assert "did you mean zero_optimization.overlap_comm" in unknown["zero_optimization.overlap_com"]


@pytest.mark.parametrize(
    ("stage", "zero", "fate"),
    [
        (0, None, "renamed"),
        (1, OptimizerParallel(), "approximated"),
        (2, OptimizerParallel(), "approximated"),
        (3, OptimizerParallel(reshard_after_forward=True), "renamed"),
    ],
)
def test_stages_of_zero(write, stage, zero, fate):
    done = read(write, {"train_batch_size": 64, "zero_optimization": {"stage": stage}})
    assert done.settings.strategy.optimizer_parallel == zero
    assert {note.key: note.fate for note in done.notes}["zero_optimization.stage"] == fate
