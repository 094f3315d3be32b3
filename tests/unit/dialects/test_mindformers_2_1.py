# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1's own kinds of files: every key of its PyNative configuration, and meshes whose experts reach beyond dp."""

import dataclasses

import pytest
import yaml
from conftest import CONFIGS

from sporeloom.core.errors import ConfigError
from sporeloom.dialects import Settings, translate
from sporeloom.strategy.config import SINGLE_DEVICE, Offload, OptimizerParallel, Recompute, Stages
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.text import strategy_text

RULES = CONFIGS / "rules" / "decoder.yaml"
PYNATIVE = {  # the keys of its five files, and the other fields of the classes behind them
    "checkpoint": {
        **{"enable_save": False, "save_path": "./output", "save_max": 1, "save_interleaved_steps": 100},
        **{"no_save_optim": False, "async_save": False, "prefix": "x", "remove_redundancy": True, "load_path": ""},
        **{"load_balanced": False, "no_load_optim": True, "load_worker_number": 1, "save_trainable_only": False},
        **{"base_load_path": "", "save_global_layout_cache": True, "reshard_worker_num": 1},
    },
    "training": {
        **{
            "steps": 10,
            "local_batch_size": 1,
            "global_batch_size": 16,
            "max_norm": 1.0,
            "seed": 42,
            "deterministic": True,
        },
        **{"use_skip_step_on_nan": False, "max_consecutive_skipped_steps": 0, "rampup_batch_size": None},
    },
    "optimizer": {
        **{"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01, "use_fused_adamw": True},
        **{"weight_decay_include": None, "weight_decay_exclude": None},
    },
    "lr_scheduler": {
        **{"type": "ConstantWarmUpLR", "learning_rate": 1e-5, "lr_end": 1e-5, "warmup_lr_init": 0, "warmup_steps": 0},
        **{"warmup_ratio": 0, "total_steps": -1},
    },
    "parallelism": {
        **{"data_parallel_shard": -1, "data_parallel_shard_strategy": "optim_grads_params", "cpu_offload": False},
        **{"reshard_after_forward_policy": "default", "disable_gradient_division": True, "dense_fsdp_shard_size": None},
        **{
            "tensor_parallel": 1,
            "context_parallel": 1,
            "context_parallel_method": "colossal",
            "sequence_parallel": True,
        },
        **{"context_parallel_async": False, "ulysses_degree_in_cp": None, "context_parallel_mask_type": "causal"},
        **{"pipeline_parallel": 1, "pipeline_parallel_schedule": "1f1b", "pipeline_parallel_interleave_num": 1},
        **{"pipeline_parallel_layers_per_stage": None, "pipeline_parallel_microbatch_size": 1},
        **{"pipeline_parallel_overlap_p2p": False, "pipeline_parallel_overlap_b_f": False, "enable_mc2": False},
        **{"pipeline_parallel_enable_dxdw_split": False, "pipeline_parallel_p2p_transport": "plain"},
        **{"enable_loss_parallel": False, "npu_nums_per_device": 8, "moe_token_dispatcher_type": "alltoall"},
        **{"expert_parallel": 8, "expert_parallel_async_d2h": False, "expert_parallel_use_safe_tokens": True},
    },
    "recompute": {"mode": "full", "full_recompute_layer": ["0-2"], "select_module": None, "exclude_op": None},
    "recompute_comm": {"enable": False, "select_module": None},
    "swap": {"enable": False, "default_prefetch": 1, "layer_swap": None, "op_swap": None},
    "train_dataset": {"dataloader": {"type": "BlendedMegatronDatasetDataLoader", "config": {"seq_length": 4096}}},
    "model": {"model_type": "deepseek_v4", "num_hidden_layers": 3, "hidden_size": 64},
    "monitor": {"tensorboard": {"log_interval": 1}},
    "context": {"mode": 1},
    "profiler": {"enable_profiling": False},
    "callbacks": [],
    "lora_config": None,
    "run_mode": "train",
}


def read(write, values, devices=16, **known):
    path = write("theirs.yaml", yaml.safe_dump(values, sort_keys=False))
    return translate(path, "ours", RULES, path.parent / "mine.yaml", Settings(SINGLE_DEVICE, known), devices)


def changed(**sections):
    """PYNATIVE with other values in some of its sections."""
    new = {name: {**PYNATIVE[name], **values} for name, values in sections.items()}
    return {**PYNATIVE, **new}


def fates(done):
    return {note.key: note.fate for note in done.notes}


def test_every_key_of_its_pynative_files_is_read(write):
    done = read(write, PYNATIVE)
    assert done.losses == []
    assert done.settings.strategy.mesh == Mesh(dp=16, ep=8)
    assert done.settings.strategy.recompute == Recompute()  # all three layers
    assert done.settings.strategy.optimizer_parallel == OptimizerParallel(reshard_after_forward=True)
    assert done.settings.train == {
        **{"steps": 10, "batch_size": 16, "batch_size_ramp": (), "max_grad_norm": 1.0, "seed": 42, "save_every": 0},
        **{"optimizer": "adamw", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.01},
        **{"learning_rate": 1e-5, "min_learning_rate": 1e-5, "warmup_steps": 0, "schedule": "cosine"},
        **{"keep_last": 1, "async_save": False},
    }


def test_without_a_word_it_shards_over_all_replicas(write):
    values = changed()
    values["parallelism"] = {"npu_nums_per_device": 8}
    assert read(write, values).settings.strategy.optimizer_parallel is not None
    assert read(write, {"parallelism": {"tensor_parallel": 2}}).settings.strategy.optimizer_parallel is None  # 1.9


@pytest.mark.parametrize(
    ("parallelism", "zero"),
    [
        ({"data_parallel_shard": 1}, None),
        ({"data_parallel_shard": 16}, OptimizerParallel(reshard_after_forward=True)),
        ({"data_parallel_shard": 4}, OptimizerParallel(shard_size=4, reshard_after_forward=True)),
        ({"dense_fsdp_shard_size": 2}, OptimizerParallel(shard_size=2, reshard_after_forward=True)),
        ({"reshard_after_forward_policy": "never"}, OptimizerParallel()),
        ({"data_parallel_shard_strategy": "optim_grads"}, OptimizerParallel()),
    ],
)
def test_what_is_sharded_over_the_replicas(write, parallelism, zero):
    assert read(write, changed(parallelism=parallelism)).settings.strategy.optimizer_parallel == zero


@pytest.mark.parametrize(
    ("recompute", "ours"),
    [
        ({"mode": "None"}, None),
        ({"mode": "full", "full_recompute_layer": ["0-2"]}, Recompute()),
        ({"mode": "full", "full_recompute_layer": ["0", "2"]}, Recompute(layers=[0, 2])),
        ({"mode": "full", "full_recompute_layer": ["1-2"]}, Recompute(layers=[1, 2])),
        ({"mode": "select", "select_module": {"mlp": ["0-1"]}}, Recompute(kind="selective")),
    ],
)
def test_layers_that_are_recomputed(write, recompute, ours):
    assert read(write, {**PYNATIVE, "recompute": recompute}).settings.strategy.recompute == ours


@pytest.mark.parametrize(
    ("recompute", "told"),
    [
        ({"mode": "full"}, r"mode full needs full_recompute_layer, a list of layers as \[0-2, 5\], got None"),
        ({"mode": "full", "full_recompute_layer": ["2-0"]}, "mode full needs full_recompute_layer"),
        ({"mode": "some"}, "recompute.mode must be None, full or select, got 'some'"),
        ({"mod": "full"}, "recompute.mod is not a key of MindFormers 2.x; did you mean mode"),
    ],
)
def test_recomputation_that_cannot_be_is_refused(write, recompute, told):
    with pytest.raises(ConfigError, match=told):
        read(write, {**PYNATIVE, "recompute": recompute})


@pytest.mark.parametrize(
    ("stages", "interleave", "layers"),
    [
        (["0-3", "4-9"], 1, [4, 6]),
        (["0-1,4-4", "2-3,5-9"], 2, [2, 2, 1, 5]),
        ([[2, 3], [3, 2]], 2, [2, 3, 3, 2]),
        ("auto", 1, None),
    ],
)
def test_layers_of_stages(write, stages, interleave, layers):
    pipeline = {
        **{"pipeline_parallel": 2, "pipeline_parallel_layers_per_stage": stages, "expert_parallel": 1},
        **{"pipeline_parallel_interleave_num": interleave},
        "pipeline_parallel_schedule": "interleaved_1f1b" if interleave > 1 else "1f1b",
    }
    done = read(write, changed(parallelism=pipeline))
    ours = done.settings.strategy.pipeline
    assert ours.stages == (Stages(num_layers=layers) if layers else "uniform")
    assert (ours.virtual_stages, ours.schedule, ours.num_microbatches) == (interleave, "1f1b", 2)  # 16 of dp 8
    assert fates(done)["parallelism.pipeline_parallel_schedule"] in ("same", "renamed")


def test_layers_in_another_order_are_not_expressible(write):
    pipeline = {"pipeline_parallel": 2, "pipeline_parallel_layers_per_stage": ["4-9", "0-3"], "expert_parallel": 1}
    done = read(write, changed(parallelism=pipeline))
    assert fates(done)["parallelism.pipeline_parallel_layers_per_stage"] == "not expressible"


@pytest.mark.parametrize(
    ("sections", "lost"),
    [
        (
            {"optimizer": {"type": "Muon", "momentum": 0.95}},
            "optimizer.type optimizer.momentum optimizer.betas optimizer.eps",
        ),
        ({"parallelism": {"cpu_offload": True}}, "parallelism.cpu_offload"),
        ({"parallelism": {"context_parallel_mask_type": "full"}}, "parallelism.context_parallel_mask_type"),
        ({"training": {"use_skip_step_on_nan": True}}, "training.use_skip_step_on_nan"),
        ({"training": {"max_consecutive_skipped_steps": 3}}, "training.max_consecutive_skipped_steps"),
        ({"lr_scheduler": {"type": "LinearWithWarmUpLR"}}, "lr_scheduler.type"),
        ({"lr_scheduler": {"warmup_lr_init": 1e-6}}, "lr_scheduler.warmup_lr_init"),
        ({"optimizer": {"weight_decay_exclude": ["norm"]}}, "optimizer.weight_decay_exclude"),
        ({"checkpoint": {"load_path": "/x"}}, "checkpoint.load_path"),
        ({"recompute": {"exclude_op": {"x": ["0"]}}}, "recompute.exclude_op"),
    ],
)
def test_what_cannot_be_said_is_named(write, sections, lost):
    assert set(lost.split()) <= {note.key for note in read(write, changed(**sections)).losses}


def test_a_swap_is_offload_and_adapters_are_another_verbs(write):
    values = {
        **PYNATIVE,
        "recompute": {"mode": "None"},
        "swap": {"enable": True, "layer_swap": [{"layers": ["0-1"], "backward_prefetch": 1}]},
        "lora_config": {"target_modules": ".*", "lora_rank": 8},
    }
    done = read(write, values)
    assert done.settings.strategy.offload == Offload(layers=[0, 1])
    assert {note.key for note in done.losses if "lora" in note.key} == {
        "lora_config.target_modules",
        "lora_config.lora_rank",
    }
    assert "sporeloom sft" in next(note.text for note in done.notes if "lora" in note.key)


def test_a_ramp_of_the_batch_is_read(write):
    done = read(write, changed(training={"rampup_batch_size": [16, 16, 1000], "global_batch_size": 64}))
    assert done.settings.train["batch_size_ramp"] == (16, 16, 1000)


STATIC = """
parallel_config:
  data_parallel: {dp}
  model_parallel: {tp}
  pipeline_stage: 1
  expert_parallel: {ep}
parallel:
  enable_parallel_optimizer: True
  parallel_optimizer_config:
    optimizer_weight_shard_size: {shard}
trainer:
  model_name: deepseekV3
model:
  model_config:
    num_hidden_layers: 4
    multi_latent_attention: True
lr_schedule:
  type: {schedule}
  learning_rate: 2.0e-4
"""


@pytest.mark.parametrize(("dp", "tp", "ep", "ours"), [(4, 8, 32, 4), (2, 4, 4, 2), (4, 1, 4, 4), (4, 8, 2, 2)])
def test_experts_that_reach_beyond_the_replicas_are_read_and_named(write, dp, tp, ep, ours):
    path = write("static.yaml", STATIC.format(dp=dp, tp=tp, ep=ep, shard=256, schedule="CosineWithWarmUpLR"))
    done = translate(path, "ours", RULES, path.parent / "mine.yaml", Settings(SINGLE_DEVICE, {}), None)
    assert done.settings.strategy.mesh == Mesh(dp=dp, tp=tp, ep=ours)
    assert done.settings.strategy.optimizer_parallel.shard_size is None
    found = fates(done)
    assert found["parallel_config.expert_parallel"] == ("not expressible" if ep != ours else "renamed")
    assert found["parallel.parallel_optimizer_config.optimizer_weight_shard_size"] == "approximated"
    assert found["model.model_config.multi_latent_attention"] == "not expressible"  # a model we have not


@pytest.mark.parametrize("ep", [3, 64])
def test_experts_that_fit_nowhere_are_refused(write, ep):
    path = write("static.yaml", STATIC.format(dp=4, tp=8, ep=ep, shard=-1, schedule="CosineWithWarmUpLR"))
    with pytest.raises(ConfigError, match=f"mesh.ep = {ep} does not divide mesh.dp = 4"):
        translate(path, "ours", RULES, path.parent / "mine.yaml", Settings(SINGLE_DEVICE, {}), None)


@pytest.mark.parametrize(
    ("schedule", "lowest", "fate"),
    [
        ("ConstantWarmUpLR", 2e-4, "renamed"),
        ("CosineWithWarmUpLR", None, "no effect"),
        ("PolynomialWithWarmUpLR", None, "approximated"),
    ],
)
def test_a_constant_rate_stays_constant(write, schedule, lowest, fate):
    path = write("static.yaml", STATIC.format(dp=4, tp=1, ep=1, shard=-1, schedule=schedule))
    done = translate(path, "ours", RULES, path.parent / "mine.yaml", Settings(SINGLE_DEVICE, {}), None)
    assert done.settings.train.get("min_learning_rate") == lowest
    assert fates(done)["lr_schedule.type"] == fate


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_is_written_has_its_keys_alone(path, tmp_path):
    """It refuses those of older releases, as `hsdp_shard_size` and `full_recompute`."""
    done = translate(
        path, "mindformers2", RULES, tmp_path / "o.yaml", Settings(SINGLE_DEVICE, {"batch_size": 4096}, 64)
    )
    written = yaml.safe_load(done.text)
    assert written["parallelism"] and written["recompute"]
    for section, values in written.items():
        assert set(values) <= set(PYNATIVE[section])


@pytest.mark.parametrize(
    ("recompute", "num_layers", "written"),
    [
        (None, 4, {"mode": "None"}),
        (Recompute(), 4, {"mode": "full", "full_recompute_layer": ["0-3"]}),
        (Recompute(layers=[0, 1, 3]), 4, {"mode": "full", "full_recompute_layer": ["0-1", "3"]}),
        (Recompute(kind="selective"), 4, {"mode": "select"}),
        (Recompute(), None, {"mode": "None"}),  # which is said
    ],
)
def test_recomputation_is_a_mode_with_layers(tmp_path, recompute, num_layers, written):
    path = tmp_path / "s.yaml"
    path.write_text(strategy_text(dataclasses.replace(SINGLE_DEVICE, recompute=recompute), str(RULES)))
    done = translate(path, "mindformers2", RULES, tmp_path / "o.yaml", Settings(SINGLE_DEVICE, {}, num_layers))
    assert yaml.safe_load(done.text)["recompute"] == written
    assert ("recompute" in [note.key for note in done.losses]) == (recompute is not None and num_layers is None)
