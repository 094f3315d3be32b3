# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's flags, and their translation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sporeloom.dialects.rows import Row
from sporeloom.strategy.config import ContextMethod


def ramp(value: Any) -> tuple[int, ...]:
    return tuple(int(word) for word in str(value).split())


def spaced(values: Iterable[int]) -> str:
    return " ".join(map(str, values))


TRAIN = (
    Row("--global-batch-size", "batch_size", int),
    Row("--seq-length", "seq_len", int),
    Row("--train-iters", "steps", int),
    Row("--lr", "learning_rate", float),
    Row("--min-lr", "min_learning_rate", float),
    Row("--lr-warmup-iters", "warmup_steps", int),
    Row("--lr-decay-iters", "decay_steps", int),
    Row("--weight-decay", "weight_decay", float),
    Row("--adam-beta1", "adam_beta1", float),
    Row("--adam-beta2", "adam_beta2", float),
    Row("--adam-eps", "adam_epsilon", float),
    Row("--clip-grad", "max_grad_norm", float),
    Row("--seed", "seed", int),
    Row("--save-interval", "save_every", int),
    Row("--hidden-dropout", "dropout", float),
    Row("--initial-loss-scale", "loss_scale", float),
    Row("--loss-scale-window", "loss_scale_window", int),
    Row("--rampup-batch-size", "batch_size_ramp", ramp, spaced, "whole numbers"),
)
DEFAULTS = {
    "optimizer": "adamw",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "min_learning_rate": 0.0,
}
"""Defaults of Megatron-LM's flags for training; those here differ."""
OF_ANY_OPTIMIZER = ("max_grad_norm", "min_learning_rate")
WARMUPS = ("--lr-warmup-iters", "--lr-warmup-fraction", "--lr-warmup-samples")
DEGREES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
}
DTYPES = {"--bf16": "bfloat16", "--fp16": "float16"}
BACKENDS = {"flash": "flash", "unfused": "plain", "auto": "auto"}
"""Values of attention backends."""
METHODS: dict[str, ContextMethod] = {"all_gather": "gather", "a2a": "ulysses"}
ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
ONLY = (
    ("--lr-decay-style", "cosine", "the rate follows a cosine"),
    ("--optimizer", "adam", "AdamW, or SGD"),
)
WITHOUT_EFFECT = {
    "--nproc_per_node": "the number of devices",
    "--nproc-per-node": "the number of devices",
    "--nnodes": "the number of devices",
    "--overlap-grad-reduce": "when gradients are sent, no result depends on it",
    "--overlap-param-gather": "when weights are sent, no result depends on it",
    "--attention-dropout": "one rate serves both: --hidden-dropout",
    "--transformer-impl": "of Megatron's kernels",
    "--hidden-size": "the model's own configuration says it (--size, --config)",
    "--num-attention-heads": "the model's own configuration says it (--size, --config)",
    "--ffn-hidden-size": "the model's own configuration says it (--size, --config)",
    "--max-position-embeddings": "the model's own configuration says it (--size, --config)",
    "--log-interval": "metrics.jsonl has every step",
    "--distributed-backend": "decided by the engine",
    "--use-mcore-models": "of Megatron's code",
    "--master_addr": "msrun's",
    "--master_port": "msrun's",
    "--node_rank": "msrun's",
}
NOT_EXPRESSIBLE = {
    "--data-path": "make token files with tools/preprocess.py (--data)",
    "--load": "read a checkpoint with --resume",
    "--save": "checkpoints go to --output-dir",
    "--train-samples": "a run has a number of steps",
    "--lr-warmup-fraction": "warm-up is counted in steps",
    "--lr-warmup-samples": "warm-up is counted in steps",
    "--lr-decay-samples": "the decay is counted in steps",
}
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
MANY_VALUES = ("--rampup-batch-size", "--data-path")
