# SPDX-License-Identifier: Apache-2.0
"""Keys of DeepSpeed's configuration as tables: their translation, why they have no effect, or why they cannot be
expressed.

Names: https://www.deepspeed.ai/docs/config-json and deepspeed/runtime (config.py, constants.py, zero/config.py).
"""

from __future__ import annotations

import math
from typing import Any

from sporeloom.dialects.rows import Row, betas, number

ZERO = "zero_optimization."
MOMENTS = f"{ZERO}offload_optimizer."
PARAMETERS = f"{ZERO}offload_param."
OPTIMIZER = "optimizer.params."
SCHEDULER = "scheduler.params."
LTD = "data_efficiency.data_routing.random_ltd."
LTD_SCHEDULE = f"{LTD}random_ltd_schedule."
CURRICULUM = "data_efficiency.data_sampling.curriculum_learning."

FILLED = {
    "gradient_clipping": ("max_grad_norm",),
    f"{OPTIMIZER}lr": ("learning_rate",),
    f"{OPTIMIZER}betas": ("adam_beta1", "adam_beta2"),
    f"{OPTIMIZER}eps": ("adam_epsilon",),
    f"{OPTIMIZER}weight_decay": ("weight_decay",),
    f"{SCHEDULER}warmup_max_lr": ("learning_rate",),
    f"{SCHEDULER}warmup_num_steps": ("warmup_steps",),
    f"{SCHEDULER}total_num_steps": ("steps",),
}
"""Keys that may be "auto": the Hugging Face trainer fills in what it was given; here the flags of these fields. `batch` has
the three sizes of a batch."""


def whole(value: Any) -> int:
    """Read a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ValueError(value)
    return int(value)


def positive(value: Any) -> Any:
    if not math.isfinite(number(value)) or value < 0:
        raise ValueError(value)
    return value


def _seed(value: Any) -> Any:
    if not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value


TRAIN = (
    Row("gradient_clipping", "max_grad_norm", positive),
    Row("data_efficiency.seed", "seed", _seed),
)
ADAM = (
    Row(f"{OPTIMIZER}lr", "learning_rate", positive),
    betas(f"{OPTIMIZER}betas"),
    Row(f"{OPTIMIZER}eps", "adam_epsilon", positive),
    Row(f"{OPTIMIZER}weight_decay", "weight_decay", positive),
)
ADAM_DEFAULTS = {
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
}
"""Defaults of DeepSpeed's FusedAdam, which Adam and AdamW both are; those here differ."""
SGD = (Row(f"{OPTIMIZER}lr", "learning_rate", positive),)
RANDOM_LTD = (
    Row(f"{LTD_SCHEDULE}min_value", "random_ltd_min_value", number),
    Row(f"{LTD_SCHEDULE}schedule_config.require_steps", "random_ltd_require_steps", number),
    Row(f"{LTD_SCHEDULE}schedule_config.seq_per_step", "random_ltd_seq_per_step", number),
)
ONLY = (
    (f"{LTD_SCHEDULE}schedule_type", "fixed_linear", "the number of tokens grows evenly"),
    ("gradient_allreduce_op", "mean", "gradients are those of the mean over the full batch"),
    ("managed_gradient_accumulation", True, "a step always uses the full batch"),
    ("bf16.bf16_master_weights_and_grads", False, "the master weights are float32"),
    ("bf16.bf16_optimizer_states", False, "moments are float32"),
    ("fp16.fp16_master_weights_and_grads", False, "the master weights are float32"),
    ("data_types.grad_accum_dtype", "fp32", "gradients are summed in float32"),
    ("data_types.param_dtype", "fp32", "the master weights are float32"),
    ("dataloader_drop_last", True, "each step uses the full batch"),
    (f"{ZERO}zero_quantized_weights", False, "weights are gathered as they are"),
    (f"{ZERO}zero_quantized_nontrainable_weights", False, "weights are gathered as they are"),
    (f"{ZERO}zero_quantized_gradients", False, "gradients are summed as they are"),
    (f"{ZERO}zero_hpz_partition_size", 1, "no second copy of the weights is kept within a node"),
    (f"{ZERO}legacy_stage1", False, "of old versions of DeepSpeed"),
    (f"{MOMENTS}ratio", 1.0, "all moments wait on the host, or none"),
    (f"{MOMENTS}super_offload", False, "of DeepSpeed's code"),
    (f"{OPTIMIZER}amsgrad", False, "AdamW as Adam's authors have it"),
    ("zero_optimization", False, "its section is expected: {stage: 1}"),
)
"""Keys that can have one value here, with the reason."""

WITHOUT_EFFECT = {
    "train_micro_batch_size_per_gpu": "it follows from train_batch_size, gradient_accumulation_steps and the devices",
    "steps_per_print": "metrics.jsonl has every step",
    "wall_clock_breakdown": "metrics.jsonl has the time of each step",
    "memory_breakdown": "plans and dry runs have it",
    "dump_state": "config.json of a run has its settings",
    "log_level": "milestones alone are logged",
    "prescale_gradients": "the mean is the same",
    "gradient_predivide_factor": "the mean is the same",
    "sparse_gradients": "the sums are the same",
    "communication_data_type": "what is communicated is what is computed",
    "seq_parallel_communication_data_type": "what is communicated is what is computed",
    "disable_allgather": "of DeepSpeed's code",
    "graph_harvesting": "graphs are compiled",
    "check_overflow": "every step is checked",
    "vocabulary_size": "the model's own configuration says it",
    "use_data_before_expert_parallelism": "this file has no expert parallelism",
    "zero_allow_untested_optimizer": "of DeepSpeed's code",
    "zero_force_ds_cpu_optimizer": "of DeepSpeed's code",
    "data_efficiency.enabled": "its sections say it",
    "data_efficiency.data_routing.enabled": "its sections say it",
    "data_efficiency.data_sampling.enabled": "its sections say it",
    "data_efficiency.data_sampling.num_workers": "batches are made ahead by a thread",
    "data_efficiency.data_sampling.num_epochs": "--steps says when a run ends",
    "data_efficiency.data_sampling.pin_memory": "batches are made ahead by a thread",
    f"{LTD}random_ltd_layer_num": "random_ltd_layer_id has as many",
    f"{LTD}model_mask_name": "of DeepSpeed's code",
    f"{LTD}model_type": "all models here are decoders",
    f"{LTD}hidden_state_order": "of DeepSpeed's code",
    f"{LTD}micro_batch_size": "the batch's",
    f"{LTD}global_batch_size": "train_batch_size",
    "fp16.auto_cast": "inputs are token ids",
    "fp16.hysteresis": "each overflow lowers the scale",
    "fp16.consecutive_hysteresis": "each overflow lowers the scale",
    "bf16.check_grad_overflow": "every step is checked",
    "bf16.immediate_grad_update": "of DeepSpeed's code",
    "optimizer.legacy_fusion": "of DeepSpeed's code",
    f"{OPTIMIZER}torch_adam": "the numbers are the same",
    f"{OPTIMIZER}fused": "the numbers are the same",
    f"{OPTIMIZER}foreach": "the numbers are the same",
    f"{OPTIMIZER}set_grad_none": "of DeepSpeed's code",
    "tensorboard.*": "every run writes it",
    "comms_logger.*": "dry runs list every collective",
    "flops_profiler.*": "plans and dry runs count them",
    "timers.*": "metrics.jsonl has the time of each step",
    "autotuning.*": "`sporeloom plan` does that instead",
    "aio.*": "how files are read is the engine's own",
    "checkpoint.*": "checkpoints have one form; --resume reads them on any mesh",
    "nebula.*": "checkpoints have one form; --resume reads them on any mesh",
    "datastates.*": "checkpoints have one form; --resume reads them on any mesh",
    "compile.*": "graphs are compiled",
    "hybrid_engine.*": "one network trains and samples (grpo, ppo)",
    "data_types.buffer_dtype": "models here have no buffers",
}
ZERO_WITHOUT_EFFECT = (
    *("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint"),
    *("sub_group_size", "cpu_offload_use_pin_memory", "ignore_unused_parameters", "round_robin_gradients"),
    *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings"),
    *("enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "mics_hierarchical_params_gather", "grad_hooks"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
    *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "prefetch_bucket_size"),
    *("param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance"),
    *("gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params"),
    *("allgather_sequential", "zeropp_loco_param", "leaf_module"),
)
"""Keys of `zero_optimization` without effect: when and how weights and gradients are sent is the engine's
decision."""
MOMENTS_WITHOUT_EFFECT = (
    *("nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "pipeline", "fast_init"),
    *("buffer_size", "max_in_cpu", "cpuadam_cores_perc"),
)
"""Keys of `zero_optimization.offload_optimizer` without effect."""

SECTIONS = {
    "amp": "mixed precision is --compute-dtype",
    "torch_autocast": "mixed precision is --compute-dtype",
    "progressive_layer_drop": "all layers are computed",
    "eigenvalue": "it is for quantized training",
    "quantize_training": "weights are not quantized in training",
    "weight_quantization": "weights are not quantized in training",
    "compression_training": "weights are neither quantized nor pruned in training",
    "elasticity": "a run has one batch size; --resume takes any mesh",
    "expert_parallel": "write mesh.ep in the strategy",
    "pipeline": "write mesh.pp and pipeline in the strategy",
    "activation_checkpointing": "write recompute in the strategy",
    "sparse_attention": "attention is not sparse",
    "curriculum_learning": "its older form: --seq-len-growth",
    "csv_monitor": "metrics.jsonl is JSON lines",
    "wandb": "TensorBoard's files are written",
    "comet": "TensorBoard's files are written",
    CURRICULUM.removesuffix("."): "write a file for --curriculum, with these words, for one metric",
    f"{LTD}layer_token_lr_schedule": "the rate follows steps",
    f"{ZERO}zenflow": "of DeepSpeed's code",
}
"""Sections without effect here, with the reason; not reported where they are switched off."""
