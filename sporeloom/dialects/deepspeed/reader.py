# SPDX-License-Identifier: Apache-2.0
"""Read DeepSpeed's configuration as settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.dialects.deepspeed.batch import batch
from sporeloom.dialects.deepspeed.keys import (
    FILLED,
    LTD,
    LTD_SCHEDULE,
    MOMENTS,
    MOMENTS_WITHOUT_EFFECT,
    ONLY,
    OPTIMIZER,
    PARAMETERS,
    RANDOM_LTD,
    SCHEDULER,
    SECTIONS,
    TRAIN,
    WITHOUT_EFFECT,
    ZERO,
    ZERO_WITHOUT_EFFECT,
    positive,
    whole,
)
from sporeloom.dialects.deepspeed.optimizer import optimizer, schedule
from sporeloom.dialects.rows import read_rows
from sporeloom.dialects.settings import GivenValue, InputKeys, Note, Settings
from sporeloom.dialects.stages import as_ranges
from sporeloom.dialects.yaml_file import read_flat
from sporeloom.strategy.config import ContextMethod, Offload, OptimizerParallel, Strategy
from sporeloom.strategy.mesh import Mesh

AUTO = "auto"


def read(path: Path, known: Settings, devices: int | None) -> tuple[Settings, list[Note]]:
    """Read a configuration. `known.train`: values of flags for what it leaves to the program around it.

    Raises:
        ConfigError: all that is wrong with it: it is not JSON, the number of devices is not known, it contradicts itself.
    """
    book, problems = InputKeys(read_flat(path)), Problems()
    train: dict[str, Any] = dict(known.train)
    if not devices:
        problems.append(f"{path}: a DeepSpeed configuration does not give the number of devices: give --devices")
    _fill_in(book, known.train, problems)
    mesh = problems.of(_mesh, book, devices) if devices else None
    if mesh:
        problems.of(batch, book, train, mesh.dp)
    problems.of(read_rows, book, TRAIN, train, True)
    problems.of(_precision, book, train)
    problems.of(optimizer, book, train)
    problems.of(schedule, book, train)
    num_layers = problems.of(_random_ltd, book, train) or known.num_layers
    zero = problems.of(_zero, book)
    offload = problems.of(_offload, book)
    problems.raise_if_any()
    assert mesh
    if mesh.dp == 1 and zero and zero.shard_size:
        zero = OptimizerParallel()
    context: ContextMethod = "ulysses" if mesh.cp > 1 else "gather"
    strategy = Strategy(mesh=mesh, optimizer_parallel=zero, offload=offload, context_parallel=context, source=str(path))
    _sections(book)
    book.only(ONLY)
    ltd = {f"{LTD}*": "random-LTD is off"} if book.peek(f"{LTD}enabled") is not True else {}
    zero_keys = {f"{ZERO}{name}": "decided by the engine" for name in ZERO_WITHOUT_EFFECT}
    zero_keys |= {f"{ZERO}{name}.*": "decided by the engine" for name in ("leaf_module", "zeropp_loco_param")}
    moments = {f"{MOMENTS}{name}": "how they are moved is decided by the engine" for name in MOMENTS_WITHOUT_EFFECT}
    book.without_effect({**WITHOUT_EFFECT, **ltd, **zero_keys, **moments})
    names = [*(row.key for row in TRAIN), *FILLED, *WITHOUT_EFFECT, *zero_keys, *moments, *SECTIONS]
    return Settings(strategy, train, num_layers), book.finish(names)


def _fill_in(book: InputKeys, flags: dict[str, Any], problems: Problems) -> None:
    """Put the flags' values where the Hugging Face trainer would put its arguments."""
    for key, fields in FILLED.items():
        if book.peek(key) != AUTO:
            continue
        values = [flags.get(field) for field in fields]
        missing = [_flag(field) for field, value in zip(fields, values, strict=True) if value is None]
        if missing:
            kind = "a number" if len(fields) == 1 else "two numbers"
            problems.append(
                f"{book.given[key].place}: {key} must be {kind}, got 'auto', which the Hugging Face trainer fills in; give "
                f"{' and '.join(missing)}"
            )
            values = [1 for _ in fields]  # only so that nothing else is noted about it
        book.fill(key, GivenValue(values if len(fields) > 1 else values[0], book.given[key].place))
    if book.peek(f"{SCHEDULER}warmup_min_lr") == AUTO:  # as the trainer has it
        book.fill(f"{SCHEDULER}warmup_min_lr", GivenValue(0, book.given[f"{SCHEDULER}warmup_min_lr"].place))
    dtype = flags.get("compute_dtype")
    for section, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        key = f"{section}.enabled"
        if book.peek(key) == AUTO and dtype:
            book.fill(key, GivenValue(dtype == name, book.given[key].place))


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _mesh(book: InputKeys, devices: int) -> Mesh:
    degrees = {}
    for key, axis in (("tensor_parallel.autotp_size", "tp"), ("sequence_parallel_size", "cp")):
        degrees[axis] = max(1, _value(book, key, lambda value: value and whole(value), "a whole number", 1))
        book.note(key, "renamed" if degrees[axis] > 1 else "same", f"mesh.{axis}")
    for key in [key for key in book.given if key.startswith("tensor_parallel.")]:
        book.note(key, "no effect", "the rules of a strategy say which weights are sharded")
    of_model = degrees["tp"] * degrees["cp"]
    if devices % of_model:
        raise ConfigError(
            f"--devices {devices} is not a multiple of tp {degrees['tp']} x cp {degrees['cp']}, which the file needs"
        )
    return Mesh(dp=devices // of_model, tp=degrees["tp"], cp=degrees["cp"])


def _value(book: InputKeys, key: str, read: Callable[[Any], Any], takes: str, default: Any) -> Any:
    """Result of `read` for a key's value.

    Raises:
        ConfigError: nothing.
    """
    if key not in book:
        return default
    try:
        return read(book.peek(key))
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{book.given[key].place}: {key} must be {takes}, got {book.peek(key)!r}") from None


def _switch(value: Any) -> bool | None:
    if value not in (True, False, AUTO) or isinstance(value, (int, float)) is not isinstance(value, bool):
        raise ValueError(value)
    return None if value == AUTO else bool(value)


def _precision(book: InputKeys, train: dict[str, Any]) -> None:
    on = {
        section: _value(book, f"{section}.enabled", _switch, 'true, false or "auto"', False)
        for section in ("bf16", "fp16")
    }
    if on["bf16"] and on["fp16"]:
        raise ConfigError(
            f"{book.given['fp16.enabled'].place}: bf16 and fp16 are both enabled, which DeepSpeed refuses; leave one"
        )
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if on[section]:
            asked = train.setdefault("compute_dtype", dtype)
            if asked != dtype:
                raise ConfigError(
                    f"{book.given[f'{section}.enabled'].place}: {section} is enabled, but --compute-dtype is {asked}"
                )
        why = f"--compute-dtype {dtype}" if on[section] else "the other key gives the type"
        if on[section] is None:
            book.note(f"{section}.enabled", "not expressible", "the program around it decides; give --compute-dtype")
        book.note(f"{section}.enabled", "renamed", why)
    if "compute_dtype" not in train and any(f"{section}.enabled" in book for section in on) and None not in on.values():
        train["compute_dtype"] = "float32"
    _loss_scale(book, train, bool(on["fp16"]))


def _loss_scale(book: InputKeys, train: dict[str, Any], is_half: bool) -> None:
    fixed = _value(book, "fp16.loss_scale", positive, "a number", 0)
    power = _value(book, "fp16.initial_scale_power", positive, "a number", 16)
    window = _value(book, "fp16.loss_scale_window", whole, "a number of steps", 1000)
    if not is_half:
        book.without_effect({"fp16.*": "fp16 is off"})
        return
    for key, name in (("loss_scale", "loss-scale"), ("initial_scale_power", "loss-scale")):
        is_used = bool(fixed) == (key == "loss_scale")
        book.note(
            f"fp16.{key}", "renamed" if is_used else "no effect", f"--{name}" if is_used else "given by the other key"
        )
    book.note("fp16.loss_scale_window", "no effect" if fixed else "same", "" if not fixed else "the scale is fixed")
    book.note("fp16.min_loss_scale", "approximated", "the scale is not lowered below 1")
    train |= {"loss_scale": float(fixed or 2.0**power), "loss_scale_window": 0 if fixed else window}


def _random_ltd(book: InputKeys, train: dict[str, Any]) -> int | None:
    """Number of layers, where the file gives it."""
    is_on = book.peek(f"{LTD}enabled", False) is True
    for key in (f"{LTD}enabled", f"{LTD}total_layer_num"):
        book.note(key, "no effect", "given by the other keys" if is_on else "random-LTD is off")
    if not is_on:
        return None
    read_rows(book, RANDOM_LTD, train, flags=True)
    layers = book.peek(f"{LTD}random_ltd_layer_id")
    if isinstance(layers, list):
        train["random_ltd_layers"] = tuple(as_ranges(layers))
        book.note(f"{LTD}random_ltd_layer_id", "renamed", "--random-ltd-layers")
    highest, length = book.peek(f"{LTD_SCHEDULE}max_value"), train.get("seq_len")
    why = "in the end the layers process the full sequence: --seq-len"
    book.note(f"{LTD_SCHEDULE}max_value", "same" if highest == length else "approximated", why)
    total: int | None = _value(book, f"{LTD}total_layer_num", whole, "a number of layers", None)
    return total


def _stage(book: InputKeys) -> int | None:
    """ZeRO's stage; None if the file does not give it."""
    if book.peek("zero_optimization") is True:  # as old files have it
        return 1
    stage = book.peek(f"{ZERO}stage")
    if f"{ZERO}stage" in book and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        raise ConfigError(f"{book.given[f'{ZERO}stage'].place}: stage must be 0 to 3, got {stage!r}")
    return None if stage is None else int(stage)


def _offload(book: InputKeys) -> Offload | None:
    stage, moments, weights = _stage(book), book.peek(f"{MOMENTS}device", "none"), book.peek(f"{PARAMETERS}device")
    problems = Problems()
    if book.peek(f"{ZERO}cpu_offload") is True:
        book.note(f"{ZERO}cpu_offload", "renamed", "offload.optimizer")
        moments = "cpu"
    if moments != "none" and stage == 0:
        key = next(key for key in (f"{MOMENTS}device", f"{ZERO}cpu_offload") if key in book)
        problems.append(f"{book.given[key].place}: {key} needs zero_optimization.stage 1, 2 or 3, got 0")
    for key, value in (
        (f"{PARAMETERS}device", weights),
        (f"{ZERO}cpu_offload_param", book.peek(f"{ZERO}cpu_offload_param")),
    ):
        if value not in (None, "none", False) and stage != 3:
            problems.append(
                f"{book.given[key].place}: {key} needs zero_optimization.stage 3, got {0 if stage is None else stage}"
            )
    problems.raise_if_any()
    kept = weights in (None, "none")
    for key in [key for key in book.given if key.startswith(PARAMETERS)]:
        why = "nothing is moved" if kept else "weights stay on the device; write `offload` for activations"
        book.note(key, "no effect" if kept else "not expressible", why)
    is_off = not book.peek(f"{ZERO}cpu_offload_param", False)
    book.note(f"{ZERO}cpu_offload_param", "same" if is_off else "not expressible", "weights stay on the device")
    book.note(f"{ZERO}cpu_offload", "same", "nothing is moved")
    if moments in ("cpu", "none"):
        book.note(f"{MOMENTS}device", "renamed" if moments == "cpu" else "same", "offload.optimizer")
    else:
        book.note(f"{MOMENTS}device", "not expressible", f"{moments}: the optimizer can be offloaded to the host (cpu)")
    return Offload(optimizer=True) if moments == "cpu" else None


def _zero(book: InputKeys) -> OptimizerParallel | None:
    stage = _stage(book) or 0
    told = {1: "shards the weights as well as the moments", 2: "shards the weights, too"}.get(stage, "")
    becomes = f"optimizer_parallel{'.reshard_after_forward' * (stage == 3)} {told}".strip()
    for key in (f"{ZERO}stage", *(["zero_optimization"] if stage and "zero_optimization" in book else [])):
        book.note(key, "approximated" if told else "renamed", becomes)
    size = _value(
        book, f"{ZERO}mics_shard_size", lambda value: None if value == -1 else whole(value), "-1 or a number", None
    )
    book.note(f"{ZERO}mics_shard_size", "renamed" if size else "same", "optimizer_parallel.shard_size")
    if size and not stage:
        place = book.given[f"{ZERO}mics_shard_size"].place
        raise ConfigError(f"{place}: {ZERO}mics_shard_size needs zero_optimization.stage 3, got {stage}")
    return OptimizerParallel(shard_size=size, reshard_after_forward=stage == 3) if stage else None


def _sections(book: InputKeys) -> None:
    """Note sections without effect here."""
    for section, why in SECTIONS.items():
        keys = [key for key in book.given if key == section or key.startswith(f"{section}.")]
        is_off = book.peek(section) is False or book.peek(f"{section}.enabled") is False
        for key in keys:
            book.note(key, "no effect" if is_off else "not expressible", "it is off" if is_off else why)
    if book.peek("optimizer.type") is None:
        for key in [key for key in book.given if key.startswith(OPTIMIZER) and book.is_open(key)]:
            book.note(key, "not expressible", "no optimizer.type says what it is of")
