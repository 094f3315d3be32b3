# SPDX-License-Identifier: Apache-2.0
"""The keys of MindFormers 1.x, and their translation."""

from __future__ import annotations

from typing import Any

from sporeloom.dialects.rows import NotExpressibleError, Row, betas
from sporeloom.strategy.config import ContextMethod

MODEL = "model.model_config."
CHECKPOINTS = "callbacks[CheckpointMonitor]."
MISSPELLED = {"CheckpointMointor": "CheckpointMonitor", "hybird_cp": "hybrid_cp"}
DEFAULT_THRESHOLD_KB = 64  # MindSpore's own
STRICT = {
    "parallel_config": (
        *(
            "data_parallel",
            "model_parallel",
            "context_parallel",
            "expert_parallel",
            "pipeline_stage",
            "micro_batch_num",
        ),
        *("seq_split_num", "use_seq_parallel", "optimizer_shard", "gradient_aggregation_group", "vocab_emb_dp"),
        *("context_parallel_algo", "ulysses_degree_in_cp", "mem_coeff"),
    ),
    "recompute_config": (
        *("recompute", "select_recompute", "parallel_optimizer_comm_recompute", "select_comm_recompute"),
        *(
            "mp_comm_recompute",
            "recompute_slice_activation",
            "select_recompute_exclude",
            "select_comm_recompute_exclude",
        ),
    ),
}
"""Sections in which MindFormers itself refuses any other key."""
INTERLEAVE, SCHEDULER = "parallel.pipeline_config.pipeline_interleave", "parallel.pipeline_config.pipeline_scheduler"
VIRTUAL = MODEL + "pp_interleave_num"
FULL, SELECTIVE = "recompute_config.recompute", "recompute_config.select_recompute"
ZERO, ZERO_CONFIG = "parallel.enable_parallel_optimizer", "parallel.parallel_optimizer_config."
SHARD_SIZE = ZERO_CONFIG + "optimizer_weight_shard_size"
LEVEL, GRADIENTS = ZERO_CONFIG + "optimizer_level", ZERO_CONFIG + "gradient_accumulation_shard"
CONTEXT_METHOD = "parallel_config.context_parallel_algo"
METHODS: dict[str, ContextMethod] = {"colossalai_cp": "gather", "ulysses_cp": "ulysses"}
ONLY = (
    ("parallel_config.seq_split_num", 1, "sequence pipelines are not supported"),
    ("parallel.parallel_mode", 1, "sharding here is semi-automatic: every operator's layout comes from the rules"),
    ("parallel.gradients_mean", False, "gradients are added up; the loss has the denominator of the full batch"),
    ("parallel.full_batch", True, "every rank gets the shape of the global batch, and reads its own rows"),
    ("context.mode", 0, "training compiles graphs"),
)
WITHOUT_EFFECT = {
    "parallel_config.optimizer_shard": "MindFormers itself ignores it since r0.7; parallel.enable_parallel_optimizer decides",
    "parallel_config.gradient_aggregation_group": "how gradients are grouped for sending, no result depends on it",
    "parallel_config.ulysses_degree_in_cp": "ulysses_cp is of all ranks of context_parallel",
    "parallel_config.mem_coeff": "of MindFormers' automatic search; tools/plan.py chooses strategies here",
    "parallel.search_mode": "of automatic parallelism; tools/plan.py chooses strategies here",
    "parallel.enable_alltoall": "always so where mesh.ep is above 1",
    "parallel.loss_repeated_mean": "the loss has the denominator of the full batch",
    "parallel.strategy_ckpt_save_file": "a checkpoint's manifest has the positions of all tensors",
    "parallel.strategy_ckpt_config.*": "a checkpoint's manifest has the positions of all tensors",
    "parallel.dataset_strategy": "the loader follows from the mesh",
    "recompute_config.parallel_optimizer_comm_recompute": "when weights are gathered, no result depends on it",
    "recompute_config.mp_comm_recompute": "whether communication is repeated, no result depends on it",
    "recompute_config.recompute_slice_activation": "how recomputed inputs are kept, no result depends on it",
    "recompute_config.select_comm_recompute": "whether communication is repeated, no result depends on it",
    "recompute_config.select_recompute_exclude": "nothing is chosen by it here",
    "recompute_config.select_comm_recompute_exclude": "nothing is chosen by it here",
    "moe_config.*": "the model's own configuration says it (--size, --config)",
    "use_parallel": "given by the mesh",
    "context.*": "device and memory are the environment's",
    "auto_trans_ckpt": "checkpoints can be read on any mesh",
    "src_strategy_path_or_dir": "checkpoints can be read on any mesh",
    "transform_process_num": "checkpoints can be read on any mesh",
    "transform_by_rank": "checkpoints can be read on any mesh",
    "only_save_strategy": "checkpoints can be read on any mesh",
    "load_ckpt_format": "checkpoints are safetensors",
    "load_ckpt_async": "checkpoints are read by all ranks at once",
    "remove_redundancy": "no two ranks write the same",
    "balanced_load": "no two ranks read more than they hold",
    "use_legacy*": "checkpoints are safetensors with a manifest",
    "ignore_data_skip": "a resumed run always continues with the next sample",
    "data_skip_steps": "a resumed run always continues with the next sample",
    "run_mode": "each has a command of its own: train, generate, score",
    "runner_config.sink_mode": "the host feeds every step",
    "runner_config.sink_size": "the host feeds every step",
    "runner_config.num_classes": "of classifiers",
    "runner_wrapper.type": "the training step is always the same",
    "runner_wrapper.scale_sense.type": "a loss scale follows the gradients; --loss-scale-window 0 keeps it from being raised",
    "runner_wrapper.scale_sense": "1 is none",
    "runner_wrapper.use_clip_grad": "given by max_grad_norm",
    "callbacks[MFLossMonitor]*": "metrics.jsonl has every step",
    "callbacks[CheckpointMonitor]": "given by the keys below",
    CHECKPOINTS + "integrated_save": "each rank writes its own shards",
    CHECKPOINTS + "prefix": "folders are named by their step",
    CHECKPOINTS + "checkpoint_format": "checkpoints are safetensors",
    "callbacks[ObsMonitor]*": "an upload to a cloud store",
    "print_separate_loss": "there is one loss",
    "trainer.type": "given by the model family",
    "model.arch.*": "given by the model family",
    "processor.*": "the tokenizer is found by the model family",
    "tensorboard.*": "tensorboard/ is always written",
    "metric.*": "of evaluation",
    "eval*": "of evaluation",
    "do_eval": "of evaluation",
    "profile*": "of MindSpore's profiler",
    "init_start_profile": "of MindSpore's profiler",
    "mstx": "of MindSpore's profiler",
    "autotune*": "of MindSpore's data pipelines",
    "auto_tune": "of MindSpore's data pipelines",
    "filepath_prefix": "of MindSpore's data pipelines",
    "monitor_config.*": "of MindFormers' monitors",
    "layer_scale": "of vision models",
    "layer_decay": "of vision models",
    "lr_scale*": "of vision models",
    "train_dataset.*": "of MindSpore's data pipelines; this package has its own loader",
    "train_dataset_task.*": "of MindSpore's data pipelines; this package has its own loader",
    "remote_save_url": "an upload to a cloud store",
    "pretrained_model_dir": "of MindFormers' own inference; tools/generate.py takes --checkpoint",
    "input_data": "of MindFormers' own inference; tools/generate.py takes --prompt",
    "predict_batch_size": "of MindFormers' own inference; tools/generate.py takes --batch-size",
    "save_file": "of MindFormers' own inference; tools/generate.py prints",
    "adapter_id": "of MindFormers' own inference",
    "postprocess_use_numpy": "of MindFormers' own inference",
    "reshard_worker_num": "checkpoints can be read on any mesh",
    "exclude_cann_cpu": "device and memory are the environment's",
    "train_precision_sync": "a run on one mesh repeats itself",
    "infer_precision_sync": "a run on one mesh repeats itself",
    "lr_schedule.total_steps": "the run's steps",
    "optimizer.type": "AdamW as the original models were trained",
}


def dtype(value: Any) -> Any:
    if value is not None and value not in ("float32", "bfloat16", "float16"):
        raise NotExpressibleError(f"{value}: float32, bfloat16 or float16")
    return value


def attention(is_flash: Any) -> str:
    return "flash" if is_flash else "plain"


def is_flash(attention: str) -> bool | None:
    return {"flash": True, "plain": False}.get(attention)


TRAIN = (
    Row("seed", "seed"),
    Row("output_dir", "output_dir"),
    Row("resume_training", "resume"),
    Row("runner_config.gradient_accumulation_steps", "accumulate"),
    Row("runner_config.stop_step", "steps"),
    Row("runner_wrapper.max_grad_norm", "max_grad_norm"),
    Row("runner_wrapper.scale_sense.loss_scale_value", "loss_scale"),
    Row("runner_wrapper.scale_sense.scale_factor", "loss_scale_factor"),
    Row("runner_wrapper.scale_sense.scale_window", "loss_scale_window"),
    betas("optimizer.betas"),
    Row("optimizer.eps", "adam_epsilon"),
    Row("optimizer.beta1", "adam_beta1"),
    Row("optimizer.beta2", "adam_beta2"),
    Row("optimizer.weight_decay", "weight_decay"),
    Row("lr_schedule.learning_rate", "learning_rate"),
    Row("lr_schedule.lr_end", "min_learning_rate"),
    Row("lr_schedule.warmup_steps", "warmup_steps"),
    Row("lr_schedule.decay_steps", "decay_steps"),
    Row(CHECKPOINTS + "save_checkpoint_steps", "save_every"),
    Row(CHECKPOINTS + "keep_checkpoint_max", "keep_last"),
    Row(CHECKPOINTS + "async_save", "async_save"),
    Row(MODEL + "seq_length", "seq_len"),
    Row(MODEL + "compute_dtype", "compute_dtype", dtype),
    Row(MODEL + "use_flash_attention", "attention", attention, is_flash),
)
"""Keys that have a flag of tools/train.py."""
DEGREES = {
    "parallel_config.pipeline_stage": "pp",
    "parallel_config.data_parallel": "dp",
    "parallel_config.context_parallel": "cp",
    "parallel_config.model_parallel": "tp",
}
EXPERTS = "parallel_config.expert_parallel"
NOT_EXPRESSIBLE = {
    "runner_config.epochs": "a run has a number of steps (stop_step, --steps); it prints how many epochs that are",
    "lr_schedule.warmup_ratio": "warm-up is counted in steps (--warmup-steps)",
    "load_checkpoint": "read a checkpoint with --resume; tools/convert_checkpoint.py converts others",
    "train_dataset.data_loader.dataset_dir": "make token files of it with tools/preprocess.py (--data)",
    "optimizer.learning_rate": "lr_schedule.learning_rate takes precedence",
    "use_skip_data_by_global_norm": "no step is skipped",
}
TYPES = {
    "optimizer": "AdamW",
    "lr_schedule": "CosineWithWarmUpLR",
    "runner_wrapper": "MFTrainOneStepCell",
    "runner_wrapper.scale_sense": "DynamicLossScaleUpdateCell",
    "trainer": "CausalLanguageModelingTrainer",
}
"""Keys of sections that must name one."""
MODEL_FIELDS = (
    *("type", "num_heads", "hidden_size", "vocab_size", "batch_size", "param_init_type", "softmax_compute_type"),
    *("layernorm_compute_type", "use_past", "use_attn_mask_compression", "embedding_size"),
    *("ffn_hidden_size", "hidden_act", "eos_token_id", "eod_token", "eod_reset", "post_layernorm_residual"),
    *("pad_token_id", "checkpoint_name_or_path", "hidden_dropout_rate", "hidden_dropout_prob"),
    *("attention_dropout_rate", "dropout_rate"),
    *("attention_dropout_prob", "embedding_dropout_prob", "use_moe", "per_token_dim_expand", "repetition_penalty"),
    *("max_decode_length", "top_k", "top_p", "do_sample", "bos_token_id", "ignore_token_id", "compute_dtype"),
    *(
        "bias_dropout_fusion",
        "apply_query_key_layer_scaling",
        "attention_softmax_in_fp32",
        "rotary_dtype",
        "qkv_concat",
    ),
    *("mlp_concat", "residual_dtype", "enable_high_performance", "block_size", "num_blocks", "is_dynamic"),
    *("gmask_token_id", "use_rearrange_rope", "mask_generate", "fine_grain_interleave", "use_ring_attention"),
    *("use_rope_slice", "use_eod_attn_mask_compression", "parallel_optimizer", "quant_config", "llm_backend"),
    *("fused_rms_norm", "input_sliced_sig", "rmsnorm_compute_2d", "chunk_prefill", "calculate_per_token_loss"),
    *("pipeline_stage", "return_hidden_states", "parallel_config", "moe_config"),
)
FAMILIES = {"pangualpha": "pangu", "pangu": "pangu", "codegeex": "codegeex"}
MODELS = {"codegeex2_6b": ("codegeex", "2_6b"), "codegeex4_9b": ("codegeex", "4_9b")}
"""Names that stand for a family and a size."""
