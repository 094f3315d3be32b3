# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's flags, as they stand in a shell script or on a line; both ways for what overlaps.

Names: Megatron-LM megatron/training/arguments.py. The data parallel degree is what is left of the devices, which torchrun's
--nproc_per_node and --nnodes or our own --devices give.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from mindloom.errors import ConfigError
from mindloom.strategy.config import ContextMethod, Offload, OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from mindloom.strategy.dialects.context import context_method, written_context
from mindloom.strategy.dialects.settings import Book, Fate, Given, Lost, Note, Settings
from mindloom.strategy.dialects.stages import stage_layers
from mindloom.strategy.mesh import Mesh

TRAIN = {
    "--global-batch-size": ("batch_size", int),
    "--seq-length": ("seq_len", int),
    "--train-iters": ("steps", int),
    "--lr": ("learning_rate", float),
    "--min-lr": ("min_learning_rate", float),
    "--lr-warmup-iters": ("warmup_steps", int),
    "--lr-decay-iters": ("decay_steps", int),
    "--weight-decay": ("weight_decay", float),
    "--adam-beta1": ("adam_beta1", float),
    "--adam-beta2": ("adam_beta2", float),
    "--adam-eps": ("adam_epsilon", float),
    "--clip-grad": ("max_grad_norm", float),
    "--seed": ("seed", int),
    "--save-interval": ("save_every", int),
    "--hidden-dropout": ("dropout", float),
    "--initial-loss-scale": ("loss_scale", float),
    "--loss-scale-window": ("loss_scale_window", int),
}
BACKENDS = {"flash": "flash", "unfused": "plain", "auto": "auto"}
"""Of attention."""
METHODS: dict[str, ContextMethod] = {"all_gather": "gather", "a2a": "ulysses"}
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
    "--distributed-backend": "the engine's own",
    "--use-mcore-models": "of Megatron's code",
    "--master_addr": "msrun's",
    "--master_port": "msrun's",
    "--node_rank": "msrun's",
}
NOT_EXPRESSIBLE = {
    "--data-path": "make token files with tools/preprocess.py (--data)",
    "--load": "read a checkpoint of ours with --resume",
    "--save": "checkpoints go to --output-dir",
    "--train-samples": "a run is so many steps",
    "--lr-warmup-fraction": "warm-up is counted in steps",
    "--lr-warmup-samples": "warm-up is counted in steps",
    "--lr-decay-samples": "the decay is counted in steps",
}
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
MANY_VALUES = ("--rampup-batch-size", "--data-path")


def read(path: Path, known: Settings, devices: int | None) -> tuple[Settings, list[Note]]:
    """Flags in a file.

    Raises:
        ConfigError: no flags there; numbers that are none; the number of devices is not known.
    """
    book = Book(_flags(path))
    mesh, train = _mesh(book, path, devices), dict(known.train)
    for flag, (name, kind) in TRAIN.items():
        if flag in book:
            train[name] = _number(book, flag, None, kind)
            book.note(flag, "renamed", f"--{name.replace('_', '-')}")
    _precision(book, train)
    if "--loss-scale" in book:  # a fixed one
        train |= {"loss_scale": _number(book, "--loss-scale", None, float), "loss_scale_window": 0}
        book.note("--loss-scale", "renamed", "--loss-scale with --loss-scale-window 0: it is lowered, but never raised")
    if "--rampup-batch-size" in book:
        train["batch_size_ramp"] = tuple(
            int(word) for word in book.take("--rampup-batch-size", "batch_size_ramp").split()
        )
    num_layers = _number(book, "--num-layers", known.num_layers)
    book.note("--num-layers", "same", "num_layers")
    strategy = Strategy(
        mesh=mesh,
        pipeline=_pipeline(book, mesh, train, num_layers, path),
        recompute=_recompute(book, mesh),
        optimizer_parallel=OptimizerParallel() if "--use-distributed-optimizer" in book else None,
        offload=Offload(optimizer=True) if "--optimizer-cpu-offload" in book else None,
        sequence_parallel="--sequence-parallel" in book,
        context_parallel=context_method(book, "--cp-comm-type", mesh, METHODS),
        source=str(path),
    )
    book.note(
        "--use-distributed-optimizer", "approximated", "optimizer_parallel cuts the weights as well as the moments"
    )
    book.note("--sequence-parallel", "same", "sequence_parallel")
    book.note("--optimizer-cpu-offload", "renamed", "offload.optimizer")
    book.only(ONLY)
    book.without_effect(WITHOUT_EFFECT)
    for flag, why in NOT_EXPRESSIBLE.items():
        book.note(flag, "not expressible", why)
    return Settings(strategy, train, num_layers), book.finish([*TRAIN, *WITHOUT_EFFECT, *NOT_EXPRESSIBLE])


def _mesh(book: Book, path: Path, devices: int | None) -> Mesh:
    degrees = {}
    for axis, word in (("tp", "tensor-model"), ("pp", "pipeline-model"), ("cp", "context"), ("ep", "expert-model")):
        degrees[axis] = _number(book, f"--{word}-parallel-size", 1)
        book.note(f"--{word}-parallel-size", "renamed", f"mesh.{axis}")
    tp, pp, cp, ep = degrees.values()
    devices = devices or _devices(book)
    if not devices or devices % (tp * pp * cp):
        why = f"{devices} devices are no multiple of it" if devices else "give --devices"
        raise ConfigError(
            f"{path}: tensor {tp} x pipeline {pp} x context {cp} leave the data parallel degree open: {why}"
        )
    return Mesh(pp=pp, dp=devices // (tp * pp * cp), cp=cp, tp=tp, ep=ep)


def _precision(book: Book, train: dict[str, Any]) -> None:
    for flag, dtype in (("--bf16", "bfloat16"), ("--fp16", "float16")):
        if flag in book:
            train["compute_dtype"] = dtype
            book.note(flag, "renamed", f"--compute-dtype {dtype}")
    if "--use-flash-attn" in book:
        train["attention"] = "flash"
        book.note("--use-flash-attn", "renamed", "--attention flash")
    elif (backend := book.peek("--attention-backend")) is not None:
        train["attention"] = BACKENDS.get(backend, "auto")
        fate: Fate = "renamed" if backend in BACKENDS else "approximated"
        book.note("--attention-backend", fate, f"--attention {train['attention']}")


def _flags(path: Path) -> dict[str, Given]:
    """Every `--flag value ...` of a script; continuation lines and comments are understood, variables are not."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    given: dict[str, Given] = {}
    flag = None
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError:
            words = re.split(r"[\s\"']+", line.rstrip("\\ "))
        for word in words:
            if word.startswith("--"):
                flag, _, value = word.partition("=")
                given[flag] = Given(value or True, f"{path}:{number}")
            elif flag and (given[flag].value is True or flag in MANY_VALUES):
                before = given[flag].value
                given[flag] = Given(word if before is True else f"{before} {word}", given[flag].place)
        flag = flag if line.rstrip().endswith("\\") else None
    if not given:
        raise ConfigError(f"{path}: holds no flags")
    return given


def _number(book: Book, flag: str, default: Any, kind: type = int) -> Any:
    value = book.peek(flag, default)
    if value is default:
        return default
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{book.given[flag].place}: {flag} must be a number, got {value!r}") from None


def _devices(book: Book) -> int | None:
    for name in ("--nproc_per_node", "--nproc-per-node"):
        if name in book:
            return int(_number(book, name, 1)) * int(_number(book, "--nnodes", 1))
    return None


def _pipeline(book: Book, mesh: Mesh, train: dict[str, Any], num_layers: int | None, path: Path) -> Pipeline:
    size, batch = _number(book, "--micro-batch-size", 1), train.get("batch_size")
    microbatches = 1
    if batch:
        if batch % (size * mesh.dp):
            raise ConfigError(f"{path}: a global batch of {batch} is no multiple of micro batch {size} x dp {mesh.dp}")
        microbatches = batch // (size * mesh.dp)
    elif mesh.pp > 1:
        raise ConfigError(f"{path}: the number of microbatches needs --global-batch-size")
    if mesh.pp == 1:
        if microbatches > 1:
            train["accumulate"] = microbatches
        book.note("--micro-batch-size", "renamed", f"--accumulate {microbatches}")
        return Pipeline()
    book.note("--micro-batch-size", "renamed", f"pipeline.num_microbatches {microbatches}")
    virtual = _virtual_stages(book, mesh, num_layers, path)
    ends = {0: "--decoder-first-pipeline-num-layers", mesh.pp - 1: "--decoder-last-pipeline-num-layers"}
    given = {stage: _number(book, flag, None) for stage, flag in ends.items() if flag in book}
    if not given:
        _note_virtual_stages(book, virtual)
        return Pipeline(num_microbatches=microbatches, virtual_stages=virtual)
    middle = mesh.pp - len(given)
    rest = (num_layers or 0) - sum(given.values())
    if num_layers is None or rest < 0 or (rest % middle if middle else rest):
        raise ConfigError(f"{path}: {num_layers} layers cannot be dealt out to {mesh.pp} stages as these flags say")
    for flag in ends.values():
        book.note(flag, "renamed", "pipeline.stages.num_layers")
    counts = [given.get(stage, rest // max(1, middle)) for stage in range(mesh.pp)]
    virtual = virtual if all(count % virtual == 0 for count in counts) else 0
    _note_virtual_stages(book, virtual)
    virtual = max(1, virtual)
    parts = Stages(num_layers=[count // virtual for count in counts] * virtual)
    return Pipeline(num_microbatches=microbatches, stages=parts, virtual_stages=virtual)


def _note_virtual_stages(book: Book, virtual: int) -> None:
    """`virtual`: 0 where the stages' layers cannot be cut evenly."""
    for flag in VIRTUAL:
        if virtual:
            book.note(flag, "renamed", f"pipeline.virtual_stages {virtual}")
        else:
            book.note(flag, "not expressible", "the layers of a stage are no multiple of it")


def _virtual_stages(book: Book, mesh: Mesh, num_layers: int | None, path: Path) -> int:
    """Parts of the model that each stage holds."""
    of_stage, of_part = VIRTUAL
    count, layers = _number(book, of_stage, 1), _number(book, of_part, None)
    if layers is not None:
        if not num_layers or layers < 1 or num_layers % (mesh.pp * layers):
            raise ConfigError(
                f"{path}: {of_part} {layers} does not cut {num_layers} layers over {mesh.pp} stages evenly"
            )
        count = num_layers // (mesh.pp * layers)
    return int(count)


def _recompute(book: Book, mesh: Mesh) -> Recompute | None:
    granularity, method = book.peek("--recompute-granularity"), book.peek("--recompute-method", "uniform")
    if "--recompute-activations" in book or granularity == "selective":
        why = "recompute.kind selective: the rules' operators, attention between its products"
        for flag in ("--recompute-activations", "--recompute-granularity"):
            book.note(flag, "renamed", why)
        return Recompute(kind="selective")
    if granularity != "full":
        return None
    book.note("--recompute-granularity", "renamed", "recompute")
    if method == "block":
        count = _number(book, "--recompute-num-layers", 1)
        book.note("--recompute-method", "renamed", f"recompute.per_stage {count} each")
        book.note("--recompute-num-layers", "renamed", f"recompute.per_stage {count} each")
        return Recompute(per_stage=[count] * mesh.pp)
    why = "each layer is recomputed on its own"
    book.note("--recompute-method", "renamed", "recompute.layers all")
    book.note(
        "--recompute-num-layers", "same" if _number(book, "--recompute-num-layers", 1) == 1 else "approximated", why
    )
    return Recompute()


def write(settings: Settings) -> tuple[str, list[Note]]:
    """Flags, one a line."""
    strategy, train, lost = settings.strategy, dict(settings.train), Lost("megatron")
    mesh, recompute, zero = strategy.mesh, strategy.recompute, strategy.optimizer_parallel
    flags: list[tuple[str, Any]] = [
        ("--tensor-model-parallel-size", mesh.tp),
        *([("--expert-model-parallel-size", mesh.ep)] if mesh.ep > 1 else []),
        *written_context(strategy, METHODS, "--context-parallel-size", "--cp-comm-type").items(),
        ("--pipeline-model-parallel-size", mesh.pp),
    ]
    if settings.num_layers is not None:
        flags.append(("--num-layers", settings.num_layers))
    if settings.micro_batch_size:
        flags.append(("--micro-batch-size", settings.micro_batch_size))
    elif mesh.pp > 1:
        lost("pipeline.num_microbatches", "Megatron counts the sequences of a microbatch: give --batch-size")
    if (virtual := strategy.pipeline.virtual_stages) > 1:
        flags.append(("--num-virtual-stages-per-pipeline-rank", virtual))
    if strategy.offload and strategy.offload.layers:
        lost("offload.layers", "Megatron moves activations by other rules")
    if strategy.pipeline.schedule != "1f1b":
        lost("pipeline.schedule", f"{strategy.pipeline.schedule}: Megatron has 1f1b alone")
    if strategy.micro_batch_interleave > 1:
        lost("micro_batch_interleave", "Megatron has no copies of microbatches")
    train.pop("accumulate", None)
    for flag, (name, _) in TRAIN.items():
        if train.get(name) is not None:
            flags.append((flag, train.pop(name)))
    switches = ["--sequence-parallel"] * strategy.sequence_parallel + ["--use-distributed-optimizer"] * (
        zero is not None
    )
    switches += ["--optimizer-cpu-offload"] * strategy.optimizer_on_host
    if switch := {"bfloat16": "--bf16", "float16": "--fp16"}.get(str(train.get("compute_dtype"))):
        switches.append(switch)
        train.pop("compute_dtype")
    attention = train.pop("attention", None)
    flags += [("--attention-backend", theirs) for theirs, ours in BACKENDS.items() if ours == attention]
    if zero:
        more = "" if zero == OptimizerParallel() else "; threshold, shard size and cut gradients have no flags"
        lost(
            "optimizer_parallel",
            f"Megatron's distributed optimizer cuts the moments, not the weights{more}",
            "approximated",
        )
    flags += _stage_flags(settings, lost)
    if recompute:
        flags += _recompute_flags(recompute, lost)
    if train.get("batch_size_ramp"):
        flags.append(("--rampup-batch-size", " ".join(map(str, train.pop("batch_size_ramp")))))
    lost.rest(train)
    head = f"# {mesh.size} devices: the data parallel degree, {mesh.dp}, is what the others leave\n"
    return head + " \\\n".join([*(f"{flag} {value}" for flag, value in flags), *switches]) + "\n", lost.notes


def _stage_flags(settings: Settings, lost: Lost) -> list[tuple[str, Any]]:
    counts = stage_layers(settings, lost)
    if not counts:
        return []
    if settings.strategy.pipeline.virtual_stages > 1:
        lost("pipeline.stages", f"{counts}: virtual stages are even")
        return []
    if len(set(counts[1:-1])) > 1:
        lost("pipeline.stages", f"{counts}: only the first and the last stage can differ")
        return []
    return [("--decoder-first-pipeline-num-layers", counts[0]), ("--decoder-last-pipeline-num-layers", counts[-1])]


def _recompute_flags(recompute: Recompute, lost: Lost) -> list[tuple[str, Any]]:
    if recompute.kind == "selective":
        if recompute.per_stage is not None or recompute.layers != "all":
            lost("recompute", "selective recomputation is for all layers", "approximated")
        return [("--recompute-granularity", "selective")]
    if recompute.per_stage is not None and len(set(recompute.per_stage)) == 1:
        number = recompute.per_stage[0]
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "block"),
            ("--recompute-num-layers", number),
        ]
    if recompute.per_stage is not None or recompute.layers != "all":
        lost("recompute", "the same number of layers in every stage, or all", "approximated")
    return [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
