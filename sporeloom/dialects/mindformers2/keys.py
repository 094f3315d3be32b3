# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.x keys as tables: their translation, why they have no effect, or why they cannot be expressed."""

from __future__ import annotations

from typing import Any

from sporeloom.dialects.rows import Row, betas
from sporeloom.strategy.config import ContextMethod

PARALLELISM = "parallelism."
STAGES = f"{PARALLELISM}pipeline_parallel_layers_per_stage"
SHARDS = (f"{PARALLELISM}data_parallel_shard", f"{PARALLELISM}hsdp_shard_size")
ONLY_2_1 = {
    "parallelism": (
        *("data_parallel_shard_strategy", "reshard_after_forward_policy", "cpu_offload", "disable_gradient_division"),
        *("dense_fsdp_shard_size", "context_parallel_async", "ulysses_degree_in_cp", "context_parallel_mask_type"),
        *("pipeline_parallel_overlap_p2p", "pipeline_parallel_overlap_b_f", "pipeline_parallel_enable_dxdw_split"),
        *("pipeline_parallel_p2p_transport", "enable_mc2", "enable_loss_parallel", "npu_nums_per_device"),
        *("moe_token_dispatcher_type", "expert_parallel_async_d2h", "expert_parallel_use_safe_tokens"),
    ),
    "recompute": ("mode", "full_recompute_layer", "select_module", "exclude_op"),
    "training": ("use_skip_step_on_nan", "max_consecutive_skipped_steps", "rampup_batch_size"),
    "recompute_comm": ("enable", "select_module"),
    "swap": ("enable", "default_prefetch", "layer_swap", "op_swap"),
    "lora_config": (
        *("target_modules", "exclude_layers", "lora_rank", "lora_alpha", "lora_dropout", "lora_a_std", "lora_b_std"),
    ),
}
"""Keys that 2.1 has and 1.9 does not."""
STRICT = {
    **ONLY_2_1,
    "parallelism": (
        *("tensor_parallel", "context_parallel", "context_parallel_method", "pipeline_parallel", "expert_parallel"),
        *("pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"),
        *("pipeline_parallel_interleave_num", "hsdp_shard_size", "hsdp_optimizer_level", "hsdp_threshold"),
        *("sequence_parallel", "data_parallel_shard", "data_parallel"),
        *ONLY_2_1["parallelism"],
    ),
    "recompute": ("full_recompute", "select_recompute", *ONLY_2_1["recompute"]),
    "training": (
        *("steps", "local_batch_size", "global_batch_size", "max_norm", "seed", "deterministic"),
        *ONLY_2_1["training"],
    ),
}
METHODS: dict[str, ContextMethod] = {"colossal": "gather", "colossalai": "gather", "ulysses": "ulysses"}
SCHEDULES = {"interleaved_1f1b": "1f1b"}
"""Names of pipeline schedules in 2.1 that differ from those here."""
ONLY = (
    (f"{PARALLELISM}cpu_offload", False, "weights stay on the device; `offload` moves the optimizer and activations"),
    (f"{PARALLELISM}context_parallel_mask_type", "causal", "all models here are decoders"),
    ("training.use_skip_step_on_nan", False, "float16 skips such a step; any other run ends, or --rewind-at-spike"),
    ("training.max_consecutive_skipped_steps", 0, "no number of skipped steps ends a run"),
    ("recompute.exclude_op", None, "the rules name the operators that `kind: selective` recomputes"),
    ("optimizer.weight_decay_include", None, "decay is on matrices and embeddings"),
    ("optimizer.weight_decay_exclude", None, "decay is on matrices and embeddings"),
    ("lr_scheduler.warmup_ratio", 0, "warm-up is counted in steps: --warmup-steps"),
    ("checkpoint.save_trainable_only", False, "the full state is saved"),
    ("swap.op_swap", None, "whole layers are moved"),
    ("run_mode", "train", "each has a command of its own: generate, score, sft"),
)
"""Keys that can have one value here, with the reason."""
NEVER_MATTERS = "no result depends on it"
WITHOUT_EFFECT = {
    "parallelism.hsdp_optimizer_level": "weights, gradients and moments are all sharded where optimizer parallel is on",
    "parallelism.disable_gradient_division": "losses have the denominator of the full batch",
    "parallelism.context_parallel_async": f"when is communicated: {NEVER_MATTERS}",
    "parallelism.pipeline_parallel_overlap_p2p": f"when is communicated: {NEVER_MATTERS}",
    "parallelism.pipeline_parallel_overlap_b_f": f"what runs at the same time: {NEVER_MATTERS}",
    "parallelism.pipeline_parallel_enable_dxdw_split": "pipeline.schedule zero_bubble_v has it",
    "parallelism.pipeline_parallel_p2p_transport": f"how is communicated: {NEVER_MATTERS}",
    "parallelism.enable_mc2": f"fused communication: {NEVER_MATTERS}",
    "parallelism.enable_loss_parallel": "logits stay sharded over tp, always",
    "parallelism.npu_nums_per_device": "given by the mesh",
    "parallelism.moe_token_dispatcher_type": f"how tokens travel to their experts: {NEVER_MATTERS}",
    "parallelism.expert_parallel_async_d2h": f"when is communicated: {NEVER_MATTERS}",
    "parallelism.expert_parallel_use_safe_tokens": "experts without tokens are computed, too",
    "recompute_comm.*": f"whether communication is repeated: {NEVER_MATTERS}",
    "swap.default_prefetch": f"when activations come back: {NEVER_MATTERS}",
    "training.deterministic": "a run on one mesh repeats itself",
    "optimizer.use_fused*": f"a fused kernel: {NEVER_MATTERS}",
    "checkpoint.save_path": "checkpoints go to --output-dir",
    "checkpoint.prefix": "folders are named by their step",
    "checkpoint.remove_redundancy": "no two ranks write the same",
    "checkpoint.load_balanced": "no rank reads more than it holds",
    "checkpoint.load_worker_number": "each rank reads its own part",
    "checkpoint.reshard_worker_num": "checkpoints can be read on any mesh",
    "checkpoint.save_global_layout_cache": "a checkpoint's manifest has the positions of all tensors",
    "checkpoint.no_*": "the full state is saved and loaded",
    "checkpoint.enable_save": "given by save_interleaved_steps",
    "context.*": "device and memory are the environment's",
    "profiler.*": "of MindSpore's profiler",
    "monitor.*": "metrics.jsonl and tensorboard/ have every step",
    "callbacks*": "of MindFormers' callbacks",
    "inference.*": "of MindFormers' own inference; `sporeloom generate`",
    "lr_scheduler.total_steps": "the run's steps",
    "train_dataset.*": "this package has its own loader (--data)",
    "model.*": "the model's own configuration says it (--size, --config)",
}
ABOUT_LORA = "of `sporeloom sft`: --lora-r, --lora-alpha, --lora-dropout, --lora-target-modules"


def ramp(value: Any) -> Any:
    """Sequences at the beginning, growth, and sequences over which it grows."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != 3 or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError(value)
    return tuple(value)


ADAM_DEFAULTS = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.01}
TRAIN = (
    Row("training.steps", "steps"),
    Row("training.global_batch_size", "batch_size"),
    Row(
        "training.rampup_batch_size", "batch_size_ramp", ramp, lambda value: list(value) or None, "three whole numbers"
    ),
    Row("training.max_norm", "max_grad_norm"),
    Row("training.seed", "seed"),
    betas("optimizer.betas"),
    Row("optimizer.eps", "adam_epsilon"),
    Row("optimizer.weight_decay", "weight_decay"),
    Row("lr_scheduler.learning_rate", "learning_rate"),
    Row("lr_scheduler.lr_end", "min_learning_rate"),
    Row("lr_scheduler.warmup_steps", "warmup_steps"),
    Row("checkpoint.save_interleaved_steps", "save_every"),
    Row("checkpoint.save_max", "keep_last"),
    Row("checkpoint.async_save", "async_save"),
)
