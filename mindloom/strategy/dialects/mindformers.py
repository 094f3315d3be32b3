# SPDX-License-Identifier: Apache-2.0
"""MindFormers 1.x YAML: `parallel_config`, `parallel`, `recompute_config` and what of the rest tools/train.py knows.

Names and defaults: mindformers 1.9.0 tools/register/template.py; what it forces silently: core/parallel_config.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mindloom.errors import ConfigError
from mindloom.strategy.config import ContextMethod, OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from mindloom.strategy.dialects.context import context_method, written_context
from mindloom.strategy.dialects.settings import Book, Given, Lost, Note, Settings, betas
from mindloom.strategy.dialects.stages import rows_of_parts, stage_layers, virtual_stages
from mindloom.strategy.dialects.swap import read_swap, written_swap
from mindloom.strategy.dialects.yaml_file import read_flat
from mindloom.strategy.mesh import Mesh
from mindloom.strategy.stages import layers_of_stages, layers_per_part

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
METHODS: dict[str, ContextMethod] = {"colossalai_cp": "gather", "ulysses_cp": "ulysses"}
ONLY = (
    ("parallel_config.seq_split_num", 1, "sequence pipelines are not built"),
    ("parallel.parallel_mode", 1, "ours is semi-automatic: every operator's layout comes from the rules"),
    ("parallel.gradients_mean", False, "gradients are added up; the loss has the denominator of the whole batch"),
    ("parallel.full_batch", True, "every rank is given the shape of the whole batch, and reads its own rows"),
    ("context.mode", 0, "training compiles graphs"),
)
WITHOUT_EFFECT = {
    "parallel_config.optimizer_shard": "MindFormers itself ignores it since r0.7; parallel.enable_parallel_optimizer decides",
    "parallel_config.gradient_aggregation_group": "how gradients are grouped for sending, no result depends on it",
    "parallel_config.ulysses_degree_in_cp": "ulysses_cp is of all ranks of context_parallel",
    "parallel_config.mem_coeff": "of MindFormers' automatic search; tools/plan.py chooses strategies here",
    "parallel.search_mode": "of automatic parallelism; tools/plan.py chooses strategies here",
    "parallel.enable_alltoall": "always so where mesh.ep is above 1",
    "parallel.loss_repeated_mean": "the loss has the denominator of the whole batch",
    "parallel.strategy_ckpt_save_file": "a checkpoint's manifest says where everything is",
    "parallel.strategy_ckpt_config.*": "a checkpoint's manifest says where everything is",
    "parallel.dataset_strategy": "the loader follows from the mesh",
    "recompute_config.parallel_optimizer_comm_recompute": "when weights are gathered, no result depends on it",
    "recompute_config.mp_comm_recompute": "whether communication is repeated, no result depends on it",
    "recompute_config.recompute_slice_activation": "how recomputed inputs are kept, no result depends on it",
    "recompute_config.select_comm_recompute": "whether communication is repeated, no result depends on it",
    "recompute_config.select_recompute_exclude": "nothing is chosen by it here",
    "recompute_config.select_comm_recompute_exclude": "nothing is chosen by it here",
    "moe_config.*": "the model's own configuration says it (--size, --config)",
    "use_parallel": "the mesh says it",
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
    "ignore_data_skip": "a resumed run always goes on with the next sample",
    "data_skip_steps": "a resumed run always goes on with the next sample",
    "run_mode": "each has a tool of its own: train, generate, score",
    "runner_config.sink_mode": "the host feeds every step",
    "runner_config.sink_size": "the host feeds every step",
    "runner_config.num_classes": "of classifiers",
    "runner_wrapper.type": "the training step is always the same",
    "runner_wrapper.scale_sense.type": "a loss scale follows the gradients; --loss-scale-window 0 keeps it from being raised",
    "runner_wrapper.scale_sense": "1 is none",
    "runner_wrapper.use_clip_grad": "max_grad_norm says it",
    "callbacks[MFLossMonitor]*": "metrics.jsonl has every step",
    "callbacks[CheckpointMonitor]": "the keys below say it",
    CHECKPOINTS + "integrated_save": "each rank writes its own part",
    CHECKPOINTS + "prefix": "folders are named by their step",
    "callbacks[ObsMonitor]*": "an upload to a cloud store",
    "print_separate_loss": "there is one loss",
    "trainer.type": "the model family says it",
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
    "train_dataset.*": "of MindSpore's data pipelines; the loader is our own",
    "train_dataset_task.*": "of MindSpore's data pipelines; the loader is our own",
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
    "lr_schedule.type": "a cosine with warm-up",
    "lr_schedule.total_steps": "the run's steps",
    "optimizer.type": "AdamW as the original models were trained",
}
TRAIN = {
    "seed": "seed",
    "output_dir": "output_dir",
    "resume_training": "resume",
    "runner_config.gradient_accumulation_steps": "accumulate",
    "runner_config.stop_step": "steps",
    "runner_wrapper.max_grad_norm": "max_grad_norm",
    "runner_wrapper.scale_sense.loss_scale_value": "loss_scale",
    "runner_wrapper.scale_sense.scale_factor": "loss_scale_factor",
    "runner_wrapper.scale_sense.scale_window": "loss_scale_window",
    "optimizer.eps": "adam_epsilon",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.weight_decay": "weight_decay",
    "lr_schedule.learning_rate": "learning_rate",
    "lr_schedule.lr_end": "min_learning_rate",
    "lr_schedule.warmup_steps": "warmup_steps",
    "lr_schedule.decay_steps": "decay_steps",
    MODEL + "seq_length": "seq_len",
    CHECKPOINTS + "save_checkpoint_steps": "save_every",
    CHECKPOINTS + "keep_checkpoint_max": "keep_last",
    CHECKPOINTS + "async_save": "async_save",
}
"""Keys that have a flag of tools/train.py."""
MODEL_FIELDS = (
    *("type", "num_heads", "hidden_size", "vocab_size", "batch_size", "param_init_type", "softmax_compute_type"),
    *("layernorm_compute_type", "use_past", "use_attn_mask_compression", "embedding_size"),
    *("ffn_hidden_size", "hidden_act", "eos_token_id", "eod_token", "eod_reset", "post_layernorm_residual"),
    *("pad_token_id", "checkpoint_name_or_path", "hidden_dropout_rate", "hidden_dropout_prob"),
    *("attention_dropout_rate", "dropout_rate"),
    *("attention_dropout_prob", "embedding_dropout_prob", "use_moe", "per_token_dim_expand", "repetition_penalty"),
    *("max_decode_length", "top_k", "top_p", "do_sample", "bos_token_id", "ignore_token_id", "compute_dtype"),
)
FAMILIES = {"pangualpha": "pangu", "pangu": "pangu", "codegeex": "codegeex"}
MODELS = {"codegeex2_6b": ("codegeex", "2_6b"), "codegeex4_9b": ("codegeex", "4_9b")}
"""Whole names that stand for a family and a size."""


def read(path: Path, known: Settings) -> tuple[Settings, list[Note]]:
    """A MindFormers 1.x file. What is not strategy keeps what `known` says, where the file says nothing.

    Raises:
        ConfigError: not such a file, keys MindFormers refuses, degrees that cannot be.
    """
    book = Book(_corrected(read_flat(path, "base_config")))
    problems = book.refused(STRICT, "MindFormers 1.x")
    if "parallel_config.data_parallel" not in book and "parallel_config.model_parallel" not in book:
        problems.append(f"{path}: no parallel_config with data_parallel or model_parallel")
    if problems:
        raise ConfigError(problems)
    train, num_layers = dict(known.train), known.num_layers
    if MODEL + "num_layers" in book:
        num_layers = book.take(MODEL + "num_layers", "num_layers")
    mesh = Mesh(
        pp=book.take("parallel_config.pipeline_stage", "mesh.pp", 1),
        dp=book.take("parallel_config.data_parallel", "mesh.dp", 1),
        cp=book.take("parallel_config.context_parallel", "mesh.cp", 1),
        tp=book.take("parallel_config.model_parallel", "mesh.tp", 1),
        ep=book.take("parallel_config.expert_parallel", "mesh.ep", 1),
    )
    strategy = Strategy(
        mesh=mesh,
        pipeline=_pipeline(book, mesh, num_layers),
        recompute=_recompute(book),
        optimizer_parallel=_optimizer_parallel(book),
        offload=read_swap(book),
        sequence_parallel=bool(book.take("parallel_config.use_seq_parallel", "sequence_parallel", False)),
        context_parallel=context_method(book, "parallel_config.context_parallel_algo", mesh, METHODS),
        micro_batch_interleave=book.take("micro_batch_interleave_num", "micro_batch_interleave", 1),
        source=str(path),
    )
    _forced(book, mesh)
    _train(book, strategy, train)
    book.only(ONLY)
    book.without_effect(WITHOUT_EFFECT)
    for name in MODEL_FIELDS:
        book.note(MODEL + name, "no effect", "the model's own configuration says it (--size, --config)")
    return Settings(strategy, train, num_layers), book.finish([*TRAIN, *WITHOUT_EFFECT, *(key for key, *_ in ONLY)])


def _corrected(given: dict[str, Given]) -> dict[str, Given]:
    """Names as they are spelled today."""
    for wrong, right in MISSPELLED.items():
        given = {key.replace(f"[{wrong}]", f"[{right}]"): value for key, value in given.items()}
    return given


def _pipeline(book: Book, mesh: Mesh, num_layers: int | None) -> Pipeline:
    microbatches = book.peek("parallel_config.micro_batch_num", 1)
    if mesh.pp == 1:
        book.note("parallel_config.micro_batch_num", "no effect", "there is no pipeline; MindFormers ignores it, too")
        microbatches = 1
    else:
        book.take("parallel_config.micro_batch_num", "pipeline.num_microbatches")
    pipeline = virtual_stages(
        *(book, Pipeline(num_microbatches=microbatches), mesh, MODEL + "pp_interleave_num"),
        INTERLEAVE if book.peek(INTERLEAVE) is not None else None,
        SCHEDULER,
    )
    offset = book.peek(MODEL + "offset")
    if offset is None or offset == 0 or mesh.pp == 1:
        book.note(MODEL + "offset", "same", "stages of equal size")
        return pipeline
    rows = offset if isinstance(offset[0], list) else [offset]
    parts = mesh.pp * pipeline.virtual_stages
    if num_layers is None or [len(row) for row in rows] != [mesh.pp] * pipeline.virtual_stages:
        book.note(MODEL + "offset", "not expressible", "it needs num_layers and an entry for each stage")
        return pipeline
    layers = [num_layers // parts + extra for row in rows for extra in row]
    book.note(MODEL + "offset", "renamed", f"pipeline.stages.num_layers {layers}")
    return dataclasses.replace(pipeline, stages=Stages(num_layers=layers))


def _recompute(book: Book) -> Recompute | None:
    """Full beats selective, as MindFormers has it."""
    key, selective = "recompute_config.recompute", "recompute_config.select_recompute"
    full = _chosen(book, key, "full", "")
    if full:
        book.note(selective, "no effect", "full recomputation comes first")
        return full
    return _chosen(book, selective, "selective", "the rules say which operators; MindFormers' own choice differs")


def _chosen(book: Book, key: str, kind: Any, difference: str) -> Recompute | None:
    value = book.peek(key, False)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    counts = isinstance(value, list) and all(type(entry) is int for entry in value)
    if value in (False, None) or (counts and not any(value)):
        book.note(key, "same", "none")
        return None
    if value is True or counts:
        found = Recompute(kind=kind) if value is True else Recompute(kind=kind, per_stage=value)
        name = "recompute.layers all" if value is True else "recompute.per_stage"
        book.note(key, "approximated" if difference else "renamed", f"{name}{'; ' * bool(difference)}{difference}")
        return found
    book.note(key, "not expressible", f"{value!r}: operators are named by the rules (`selective`)")
    return None


def _optimizer_parallel(book: Book) -> OptimizerParallel | None:
    prefix, key = "parallel.parallel_optimizer_config.", "parallel.enable_parallel_optimizer"
    if not book.peek(key, False):
        book.note(key, "same", "off")
        book.without_effect({prefix + "*": "enable_parallel_optimizer is off"})
        return None
    book.take(key, "optimizer_parallel")
    threshold = book.take(
        prefix + "parallel_optimizer_threshold", "optimizer_parallel.threshold_kb", DEFAULT_THRESHOLD_KB
    )
    size = book.take(prefix + "optimizer_weight_shard_size", "optimizer_parallel.shard_size", -1)
    book.only([(prefix + "optimizer_level", "level1", "gradients or weights are not cut on their own")])
    return OptimizerParallel(
        threshold_kb=threshold,
        shard_size=None if size in (-1, None) else size,
        shard_accumulated_gradients=bool(
            book.take(prefix + "gradient_accumulation_shard", "optimizer_parallel.shard_accumulated_gradients", False)
        ),
    )


def _forced(book: Book, mesh: Mesh) -> None:
    """What MindFormers itself sets otherwise than written, without a word."""
    if book.peek("parallel_config.vocab_emb_dp") and mesh.pp > 1:
        why = "MindFormers sets it to False in a pipeline; ours cuts the vocabulary over tp as well"
        book.note("parallel_config.vocab_emb_dp", "no effect", why)
    elif book.peek("parallel_config.vocab_emb_dp") and mesh.tp > 1:
        why = "the vocabulary is cut over tp, which takes less memory and gives the same numbers"
        book.note("parallel_config.vocab_emb_dp", "approximated", why)
    book.note("parallel_config.vocab_emb_dp", "same", "the vocabulary is cut over tp")
    if mesh.pp > 1 and book.peek("runner_config.gradient_accumulation_steps", 1) != 1:
        why = "MindFormers ignores it in a pipeline, which accumulates over its microbatches"
        book.note("runner_config.gradient_accumulation_steps", "no effect", why)


def _train(book: Book, strategy: Strategy, train: dict[str, Any]) -> None:
    """Flags of tools/train.py."""
    if "trainer.model_name" in book:
        name = str(book.peek("trainer.model_name"))
        theirs, _, size = name.partition("_")
        family, size = MODELS.get(name, (FAMILIES.get(theirs), size))
        if family:
            train["model"] = family
            train |= {"size": size} if size else {}
            book.note("trainer.model_name", "renamed", f"--model {family}{' --size ' * bool(size)}{size}")
        else:
            book.note("trainer.model_name", "not expressible", f"{name}: no model of ours; see docs/guides/models.md")
    if "optimizer.betas" in book:
        train["adam_beta1"], train["adam_beta2"] = book.take("optimizer.betas", "adam_beta1 and adam_beta2")
    compute_dtype = book.peek(MODEL + "compute_dtype")
    if compute_dtype in ("float32", "bfloat16", "float16"):
        train["compute_dtype"] = book.take(MODEL + "compute_dtype", "compute_dtype")
    elif compute_dtype is not None:
        book.note(MODEL + "compute_dtype", "not expressible", f"{compute_dtype}: float32, bfloat16 or float16")
    if MODEL + "use_flash_attention" in book:
        train["attention"] = "flash" if book.take(MODEL + "use_flash_attention", "attention") else "plain"
    if not book.peek("runner_config.stop_step"):
        book.note("runner_config.stop_step", "no effect", "0 is no limit; give --steps")
    for key, name in TRAIN.items():
        if book.is_open(key):
            train[name] = book.take(key, name)
    if book.peek("runner_wrapper.use_clip_grad") is False:
        train["max_grad_norm"] = 0.0
    if "runner_config.batch_size" in book:
        parts = Settings(strategy, train).microbatches * strategy.mesh.dp
        train["batch_size"] = book.peek("runner_config.batch_size") * parts
        book.note(
            "runner_config.batch_size",
            "renamed",
            f"batch_size {train['batch_size']}: ours is over all devices and parts",
        )
    for key, why in (
        ("runner_config.epochs", "a run is so many steps (stop_step, --steps); it prints how many epochs that are"),
        ("lr_schedule.warmup_ratio", "warm-up is counted in steps (--warmup-steps)"),
        ("load_checkpoint", "read a checkpoint of ours with --resume; tools/convert_checkpoint.py converts others"),
        ("train_dataset.data_loader.dataset_dir", "make token files of it with tools/preprocess.py (--data)"),
        ("optimizer.learning_rate", "lr_schedule.learning_rate comes first"),
        ("use_skip_data_by_global_norm", "no step is skipped"),
    ):
        book.note(key, "not expressible", why)


def write(settings: Settings) -> tuple[str, list[Note]]:
    """A MindFormers 1.x file: the parallel sections, and what of the rest is known."""
    strategy, lost = settings.strategy, Lost("mindformers1")
    mesh, zero = strategy.mesh, strategy.optimizer_parallel
    copies = f"micro_batch_interleave_num: {strategy.micro_batch_interleave}"
    lines = ["use_parallel: True", copies, *_top(settings, lost), "parallel_config:"]
    degrees = {
        "data_parallel": mesh.dp,
        "model_parallel": mesh.tp,
        **written_context(strategy, METHODS, "context_parallel", "context_parallel_algo"),
        **({"expert_parallel": mesh.ep} if mesh.ep > 1 else {}),
        "pipeline_stage": mesh.pp,
        "micro_batch_num": strategy.pipeline.num_microbatches,
        "use_seq_parallel": strategy.sequence_parallel,
        "vocab_emb_dp": False,
    }
    lines += [f"  {key}: {value}" for key, value in degrees.items()]
    lines += ["parallel:", "  parallel_mode: 1", "  gradients_mean: False", "  full_batch: True"]
    lines.append(f"  enable_parallel_optimizer: {zero is not None}")
    if zero:
        lines += [
            "  parallel_optimizer_config:",
            f"    gradient_accumulation_shard: {zero.shard_accumulated_gradients}",
            f"    parallel_optimizer_threshold: {zero.threshold_kb}",
            f"    optimizer_weight_shard_size: {zero.shard_size or -1}",
        ]
    if strategy.pipeline.virtual_stages > 1:
        lines += ["  pipeline_config:", "    pipeline_interleave: True"]
        lines.append(f"    pipeline_scheduler: {strategy.pipeline.schedule}")
    lines += ["recompute_config:", *_written_recompute(settings, lost)]
    lines += written_swap(strategy, lost)
    model = _written_model(settings, lost)
    return "\n".join([*lines, *(["model:", "  model_config:", *model] if model else [])]) + "\n", lost.notes


def _top(settings: Settings, lost: Lost) -> list[str]:
    """Sections besides those of parallelism."""
    train, sections = dict(settings.train), dict[str, dict[str, Any]]()
    if both := betas(train):
        sections["optimizer"] = {"betas": both}
    lines = []
    size = settings.micro_batch_size
    if size and train.pop("batch_size"):
        sections["runner_config"] = {"batch_size": size}
    for key, name in TRAIN.items():
        if name in train and not key.startswith((MODEL, CHECKPOINTS)) and not _in_pipeline(settings, name):
            section, _, field = key.rpartition(".")
            sections.setdefault(section, {})[field] = train.pop(name)
    callback = {
        key.removeprefix(CHECKPOINTS): train.pop(name)
        for key, name in TRAIN.items()
        if key.startswith(CHECKPOINTS) and name in train
    }
    family = train.pop("model", None)
    if family:
        name = {"pangu": "pangualpha"}.get(family, family) + (f"_{train.pop('size')}" if "size" in train else "")
        sections["trainer"] = {"type": "CausalLanguageModelingTrainer", "model_name": name}
    lines += [f"{field}: {value}" for field, value in sections.pop("", {}).items()]
    if scale := sections.pop("runner_wrapper.scale_sense", None):
        values = ", ".join(f"{field}: {value}" for field, value in scale.items())
        wrapper = sections.setdefault("runner_wrapper", {})
        wrapper["scale_sense"] = f"{{type: DynamicLossScaleUpdateCell, {values}}}"
    for section, fields in sections.items():
        types = {"optimizer": "AdamW", "lr_schedule": "CosineWithWarmUpLR", "runner_wrapper": "MFTrainOneStepCell"}
        fields = {"type": types[section], **fields} if section in types else fields
        lines += [f"{section}:", *(f"  {field}: {value}" for field, value in fields.items())]
    if callback:
        lines += [
            "callbacks:",
            "  - type: CheckpointMonitor",
            *(f"    {field}: {value}" for field, value in callback.items()),
        ]
    lost.rest({name: value for name, value in train.items() if name not in ("seq_len", "compute_dtype", "attention")})
    return lines


def _in_pipeline(settings: Settings, name: str) -> bool:
    return name == "accumulate" and settings.strategy.mesh.pp > 1


def _written_recompute(settings: Settings, lost: Lost) -> list[str]:
    recompute = settings.strategy.recompute
    if recompute is None:
        return ["  recompute: False", "  select_recompute: False"]
    value: Any = True if recompute.per_stage is None else recompute.per_stage
    if value is not True and not any(value):
        lost("recompute.per_stage", f"{value} is the same as none", "approximated")
    if isinstance(recompute.layers, list) and recompute.per_stage is None:
        value = _as_first_layers(settings, recompute.layers)
        if value is None:
            lost("recompute.layers", f"{recompute.layers}: only the first layers of each stage can be named")
            value = True
        else:
            lost("recompute.layers", f"written as how many of each stage, {value}", "renamed")
    if recompute.kind == "selective":
        lost("recompute.kind", "MindFormers chooses the operators by itself", "approximated")
        return ["  recompute: False", f"  select_recompute: {value}"]
    return [f"  recompute: {value}", "  select_recompute: False"]


def _as_first_layers(settings: Settings, layers: list[int]) -> list[int] | None:
    """How many layers of each stage, if they are each stage's first ones."""
    if settings.num_layers is None:
        return None
    counts = []
    for stage in layers_of_stages(settings.num_layers, settings.strategy):
        mine = [layer for layer in stage if layer in layers]
        if mine != stage[: len(mine)]:
            return None
        counts.append(len(mine))
    return counts if sum(counts) == len(layers) else None


def _written_model(settings: Settings, lost: Lost) -> list[str]:
    """The lines of model.model_config that parallelism needs."""
    lines, counts, parts = list[str](), stage_layers(settings, lost), settings.strategy.num_virtual_stages
    total = settings.num_layers or (sum(counts) if counts else None)
    if total is not None:
        lines.append(f"    num_layers: {total}")
    if settings.strategy.pipeline.virtual_stages > 1:
        lines.append(f"    pp_interleave_num: {settings.strategy.pipeline.virtual_stages}")
    if counts is None and total and total % parts:
        counts = layers_per_part(total, settings.strategy)
        lost("pipeline.stages", f"written as offset: {counts} layers", "renamed")
    if counts and total:
        rows = rows_of_parts([count - total // parts for count in counts], settings.strategy)
        lines.append(f"    offset: {rows if len(rows) > 1 else rows[0]}")
    for key, theirs in (("seq_len", "seq_length"), ("compute_dtype", "compute_dtype")):
        lines += [f"    {theirs}: {settings.train[key]}"] if settings.train.get(key) is not None else []
    if settings.train.get("attention") in ("flash", "plain"):
        lines.append(f"    use_flash_attention: {settings.train['attention'] == 'flash'}")
    return lines
