# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configuration, a JSON file; read only. It knows no tensor or pipeline parallelism: devices are replicas.

Names: https://www.deepspeed.ai/docs/config-json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sporeloom.dialects.rows import Row, betas, number, read_rows
from sporeloom.dialects.settings import Book, Note, Settings
from sporeloom.dialects.yaml_file import read_flat
from sporeloom.errors import ConfigError
from sporeloom.strategy.config import Offload, OptimizerParallel, Strategy
from sporeloom.strategy.mesh import Mesh

LTD = "data_efficiency.data_routing.random_ltd."
SCHEDULE = f"{LTD}random_ltd_schedule."
MOMENTS = "zero_optimization.offload_optimizer."
CURRICULUM = "data_efficiency.data_sampling.curriculum_learning."
TRAIN = (
    Row("train_batch_size", "batch_size", number),
    Row("gradient_accumulation_steps", "accumulate", number),
    Row("gradient_clipping", "max_grad_norm", number),
    Row("optimizer.params.lr", "learning_rate", number),
    betas("optimizer.params.betas"),
    Row("optimizer.params.eps", "adam_epsilon", number),
    Row("optimizer.params.weight_decay", "weight_decay", number),
    Row("scheduler.params.warmup_num_steps", "warmup_steps", number),
    Row("scheduler.params.total_num_steps", "decay_steps", number),
    Row("data_efficiency.seed", "seed", number),
)
RANDOM_LTD = (
    Row(f"{SCHEDULE}min_value", "random_ltd_min_value", number),
    Row(f"{SCHEDULE}schedule_config.require_steps", "random_ltd_require_steps", number),
    Row(f"{SCHEDULE}schedule_config.seq_per_step", "random_ltd_seq_per_step", number),
)
ONLY = (
    ("optimizer.type", "AdamW", "--optimizer says which"),
    ("scheduler.type", "WarmupDecayLR", "--schedule cosine or inverse-sqrt"),
    (f"{SCHEDULE}schedule_type", "fixed_linear", "the number of tokens grows evenly"),
)
WITHOUT_EFFECT = {
    "train_micro_batch_size_per_gpu": "what is left of train_batch_size",
    "steps_per_print": "metrics.jsonl has every step",
    "wall_clock_breakdown": "metrics.jsonl has the time of each step",
    "prescale_gradients": "the mean is the same",
    "communication_data_type": "what is communicated is what is computed",
    "zero_allow_untested_optimizer": "of DeepSpeed's code",
    "zero_force_ds_cpu_optimizer": "of DeepSpeed's code",
    "data_efficiency.enabled": "its sections say it",
    "data_efficiency.data_routing.enabled": "its sections say it",
    "data_efficiency.data_sampling.enabled": "its sections say it",
    "data_efficiency.data_sampling.num_workers": "batches are made ahead by a thread",
    f"{LTD}random_ltd_layer_num": "random_ltd_layer_id has as many",
    f"{LTD}model_mask_name": "of DeepSpeed's code",
    f"{LTD}model_type": "all models here are decoders",
    f"{LTD}hidden_state_order": "of DeepSpeed's code",
    f"{LTD}micro_batch_size": "the batch's",
    f"{LTD}global_batch_size": "train_batch_size",
    "fp16.auto_cast": "inputs are token ids",
    "fp16.hysteresis": "each overflow lowers the scale",
    "fp16.consecutive_hysteresis": "each overflow lowers the scale",
    "tensorboard.*": "every run writes it",
    "comms_logger.*": "dry runs list every collective",
    "flops_profiler.*": "plans and dry runs count them",
}
NOT_EXPRESSIBLE = {
    "zero_optimization.offload_param.*": "weights stay on the device; write `offload` for activations",
    "activation_checkpointing.*": "write `recompute` in the strategy",
    f"{LTD}layer_token_lr_schedule.*": "the rate follows steps",
    f"{CURRICULUM}*": "write a file for --curriculum, with these words, for one metric",
    "curriculum_learning.*": "its older form: --seq-len-growth",
    "sparse_attention.*": "attention is whole",
    "csv_monitor.*": "metrics.jsonl is JSON lines",
    "wandb.*": "TensorBoard's files are written",
}


def read(path: Path, known: Settings, devices: int | None) -> tuple[Settings, list[Note]]:
    """What a configuration says.

    Raises:
        ConfigError: it is no JSON; the number of devices is not known.
    """
    book = Book(read_flat(path))
    if not devices:
        raise ConfigError(f"{path}: a DeepSpeed configuration does not say how many devices there are: give --devices")
    train, num_layers = dict(known.train), known.num_layers
    read_rows(book, TRAIN, train, flags=True)
    if "train_batch_size" not in book and "train_micro_batch_size_per_gpu" in book:
        micro = _number(book, "train_micro_batch_size_per_gpu", "batch_size")
        train["batch_size"] = micro * train.get("accumulate", 1) * devices
    _precision(book, train)
    if book.peek(f"{LTD}enabled", False):
        num_layers = _random_ltd(book, train, num_layers)
    for key in (f"{LTD}enabled", f"{LTD}total_layer_num"):
        book.note(key, "no effect", "random-LTD is off" if not book.peek(f"{LTD}enabled") else "said by the others")
    strategy = Strategy(mesh=Mesh(dp=devices), optimizer_parallel=_zero(book), offload=_offload(book), source=str(path))
    book.only(ONLY)
    for pattern, why in NOT_EXPRESSIBLE.items():
        for key in [k for k in book.given if k.startswith(pattern.removesuffix("*")) and book.is_open(k)]:
            book.note(key, "not expressible", why)
    book.without_effect({**WITHOUT_EFFECT, f"{LTD}*": "random-LTD is off", "zero_optimization.*": "the engine's own"})
    return Settings(strategy, train, num_layers), book.finish([*(row.key for row in TRAIN), *WITHOUT_EFFECT])


def _number(book: Book, key: str, name: str) -> Any:
    value = book.take(key, f"--{name.replace('_', '-')}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{book.given[key].place}: {key} must be a number, got {value!r}")
    return value


def _precision(book: Book, train: dict[str, Any]) -> None:
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if book.peek(f"{section}.enabled") is True:
            train["compute_dtype"] = dtype
        is_said = isinstance(book.peek(f"{section}.enabled"), bool)
        why = f"--compute-dtype {dtype}" if is_said else "the program around it decides; give --compute-dtype"
        book.note(f"{section}.enabled", "renamed" if is_said else "not expressible", why)
    fixed = _number(book, "fp16.loss_scale", "loss_scale") if "fp16.loss_scale" in book else 0
    if fixed:
        train |= {"loss_scale": float(fixed), "loss_scale_window": 0}
    if "fp16.initial_scale_power" in book:
        power = _number(book, "fp16.initial_scale_power", "loss_scale")
        train.setdefault("loss_scale", 2.0**power)
    if "fp16.loss_scale_window" in book and not fixed:
        train["loss_scale_window"] = _number(book, "fp16.loss_scale_window", "loss_scale_window")
    book.note("fp16.min_loss_scale", "approximated", "the scale is not lowered below 1")


def _random_ltd(book: Book, train: dict[str, Any], num_layers: int | None) -> int | None:
    """Number of layers, where it is said."""
    read_rows(book, RANDOM_LTD, train, flags=True)
    layers = book.peek(f"{LTD}random_ltd_layer_id")
    if isinstance(layers, list):
        train["random_ltd_layers"] = tuple(as_ranges(layers))
        book.note(f"{LTD}random_ltd_layer_id", "renamed", "--random-ltd-layers")
    highest, length = book.peek(f"{SCHEDULE}max_value"), train.get("seq_len")
    why = "in the end the layers see the whole sequence: --seq-len"
    book.note(f"{SCHEDULE}max_value", "same" if highest == length else "approximated", why)
    if f"{LTD}total_layer_num" in book:
        return int(_number(book, f"{LTD}total_layer_num", "num_layers"))
    return num_layers


def as_ranges(numbers: Sequence[int]) -> list[str]:
    """[1, 2, 3, 7] as 1-3 and 7."""
    runs: list[list[int]] = []
    for layer in sorted(numbers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def _offload(book: Book) -> Offload | None:
    device = book.peek(f"{MOMENTS}device", "none")
    to_host = device == "cpu"
    if to_host:
        book.note(f"{MOMENTS}device", "renamed", "offload.optimizer")
    elif device == "none":
        book.note(f"{MOMENTS}device", "same", "nothing is moved")
    else:
        book.note(f"{MOMENTS}device", "not expressible", f"{device}: the optimizer can wait on the host (cpu)")
    book.without_effect({f"{MOMENTS}*": "how it is moved is the engine's own"})
    return Offload(optimizer=True) if to_host else None


GATHERS_ONCE = (
    "gathers the weights once a step; add recompute: {layers: all} and optimizer_parallel.reshard_after_forward to gather "
    "them again for the backward pass"
)


def _zero(book: Book) -> OptimizerParallel | None:
    stage = book.peek("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{book.given['zero_optimization.stage'].place}: stage must be 0 to 3, got {stage!r}")
    told = {0: "", 1: "shards the weights as well as the moments", 2: "shards the weights, too", 3: GATHERS_ONCE}[stage]
    book.note("zero_optimization.stage", "approximated" if told else "renamed", f"optimizer_parallel {told}".strip())
    return OptimizerParallel() if stage else None
