# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's optimizer and learning rate scheduler, with the defaults of its own code where a file leaves them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sporeloom.core.errors import Problems
from sporeloom.dialects.deepspeed.keys import ADAM, ADAM_DEFAULTS, OPTIMIZER, SCHEDULER, SGD, positive, whole
from sporeloom.dialects.rows import fill_defaults, read_rows
from sporeloom.dialects.settings import InputKeys

ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
WARMUP_STEPS = 1000
MAX_LR = 1e-3
"""Defaults of the schedules."""
COS_MIN_RATIO = 1e-4


def optimizer(book: InputKeys, train: dict[str, Any]) -> None:
    """Translate the optimizer, into `train`.

    Raises:
        ConfigError: invalid values.
    """
    kind = book.peek("optimizer.type")
    if kind is None:
        read_rows(book, ADAM, train, flags=True)
        return
    place = book.given["optimizer.type"].place
    fill_defaults(book, train, "gradient_clipping", place, {"max_grad_norm": 0.0}, "DeepSpeed's")
    name = str(kind).lower()
    if name in ADAMS:
        _adam(book, train)
    elif name == "sgd" and not any(book.peek(f"{OPTIMIZER}{key}") for key in ("momentum", "weight_decay", "nesterov")):
        read_rows(book, SGD, train, flags=True)
        train["optimizer"] = "sgd"
        book.note("optimizer.type", "renamed", "--optimizer sgd")
        book.without_effect({f"{OPTIMIZER}*": "it is off"})
    else:
        book.note("optimizer.type", "not expressible", f"{kind!r}: --optimizer says which there are")
        read_rows(book, SGD, train, flags=True)  # of any optimizer
        for key in [key for key in book.given if key.startswith(OPTIMIZER) and book.is_open(key)]:
            book.note(key, "not expressible", f"of {kind}")


def _adam(book: InputKeys, train: dict[str, Any]) -> None:
    read_rows(book, ADAM, train, flags=True)
    fill_defaults(book, train, f"{OPTIMIZER}*", book.given["optimizer.type"].place, ADAM_DEFAULTS, "DeepSpeed's")
    has_correction = book.peek(f"{OPTIMIZER}bias_correction", True) is not False
    train["optimizer"] = "adamw" if has_correction else "adamw-original"
    book.note("optimizer.type", "renamed", f"--optimizer {train['optimizer']}")
    book.note(f"{OPTIMIZER}bias_correction", "renamed", f"--optimizer {train['optimizer']}")
    is_decoupled = book.peek(f"{OPTIMIZER}adam_w_mode", True) is not False
    is_same = is_decoupled or not train["weight_decay"]
    why = "the decay is added to the gradient there, and to the update here: AdamW"
    book.note(f"{OPTIMIZER}adam_w_mode", "same" if is_same else "not expressible", "" if is_same else why)
    if book.peek(f"{OPTIMIZER}max_grad_norm"):
        book.note(f"{OPTIMIZER}max_grad_norm", "not expressible", "write gradient_clipping")


def schedule(book: InputKeys, train: dict[str, Any]) -> None:
    """Translate the learning rate schedule, into `train`.

    Raises:
        ConfigError: invalid values, or numbers of steps that contradict each other.
    """
    kind = book.peek("scheduler.type")
    if kind is None or kind not in WARMUPS:
        _no_schedule(book, train, kind)
        return
    problems = Problems()
    total = _number(book, "total_num_steps", whole, None, problems)
    warmup = _number(book, "warmup_num_steps", _steps, WARMUP_STEPS, problems)
    lowest = _number(book, "warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr", positive, 0, problems)
    highest = _number(book, "warmup_max_lr", positive, None, problems)
    ratio = _number(book, "cos_min_ratio", positive, COS_MIN_RATIO, problems)
    if kind != "WarmupLR" and total is None and not problems:
        problems.append(f"{book.given['scheduler.type'].place}: {kind} needs scheduler.params.total_num_steps")
    if total is not None and not problems and total < warmup:
        place = book.given[f"{SCHEDULER}total_num_steps"].place
        problems.append(f"{place}: total_num_steps {total} is below warmup_num_steps {warmup}")
    problems.raise_if_any()
    train["warmup_steps"] = warmup
    if f"{SCHEDULER}warmup_num_steps" not in book:
        book.add(f"{SCHEDULER}*", _place(book), "renamed", f"--warmup-steps {warmup}, DeepSpeed's default")
    if kind != "WarmupCosineLR":
        _highest(book, train, kind, highest)
    rate = train.get("learning_rate")
    if kind == "WarmupLR":
        _constant(book, train)
    else:
        train |= {"schedule": "cosine", "decay_steps": total}
        train["min_learning_rate"] = 0.0 if kind == "WarmupDecayLR" else (rate or 0.0) * ratio
        why = "from the highest to the lowest rate in a cosine over all steps"
        why += (
            ", where it is a straight line after the warm-up"
            if kind == "WarmupDecayLR"
            else ", not those after the warm-up"
        )
        book.note("scheduler.type", "approximated", f"--schedule cosine: {why}")
        book.note(f"{SCHEDULER}total_num_steps", "renamed", "--decay-steps")
        if kind == "WarmupCosineLR":
            book.note(f"{SCHEDULER}cos_min_ratio", "renamed", "--min-learning-rate")
    _warmup_notes(book, lowest)
    _leftovers(book, f"not of {kind}")


def _steps(value: Any) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else whole(value)


def _number(book: InputKeys, name: str, read: Callable[[Any], Any], default: Any, problems: Problems) -> Any:
    key = SCHEDULER + name
    value = book.peek(key)
    if value is None:
        return default
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        problems.append(f"{book.given[key].place}: {key} must be a number, got {value!r}")
        return default


def _highest(book: InputKeys, train: dict[str, Any], kind: str, highest: float | None) -> None:
    """The maximum learning rate, which is the schedule's, whatever the optimizer's own."""
    if highest is None and kind == "WarmupLR" and "learning_rate" in train:
        why = f"--learning-rate {train['learning_rate']}, the optimizer's; old versions of DeepSpeed take {MAX_LR}"
        book.add(f"{SCHEDULER}warmup_max_lr", _place(book), "approximated", why)
        return
    own = book.peek(f"{OPTIMIZER}lr")
    if highest is None:
        book.add(f"{SCHEDULER}warmup_max_lr", _place(book), "renamed", f"--learning-rate {MAX_LR}, DeepSpeed's default")
        highest = MAX_LR
    book.note(f"{SCHEDULER}warmup_max_lr", "renamed", "--learning-rate")
    if own is not None and own != highest:
        book.renote(f"{OPTIMIZER}lr", "no effect", f"the schedule's warmup_max_lr is the highest rate, {highest}")
    train["learning_rate"] = highest


def _constant(book: InputKeys, train: dict[str, Any]) -> None:
    """A cosine between two equal rates."""
    train["schedule"] = "cosine"
    if "learning_rate" in train:
        train["min_learning_rate"] = train["learning_rate"]
    book.note(
        "scheduler.type", "renamed", "--min-learning-rate, as high as --learning-rate: constant after the warm-up"
    )


def _warmup_notes(book: InputKeys, lowest: float) -> None:
    book.note(f"{SCHEDULER}warmup_num_steps", "renamed", "--warmup-steps")
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        why = "the warm-up begins at 0"
        book.note(SCHEDULER + name, "approximated" if lowest else "same", why)
    kind, why = book.peek(f"{SCHEDULER}warmup_type", "log"), "the warm-up is a straight line, not a logarithm"
    if kind == "linear":
        book.note(f"{SCHEDULER}warmup_type", "same")
    elif f"{SCHEDULER}warmup_type" in book:
        book.note(f"{SCHEDULER}warmup_type", "approximated", why)
    else:
        book.add(f"{SCHEDULER}warmup_type", _place(book), "approximated", f"log, DeepSpeed's default: {why}")


def _no_schedule(book: InputKeys, train: dict[str, Any], kind: Any) -> None:
    if kind is not None:
        known = f"{', '.join(WARMUPS)} are read; --schedule cosine or inverse-sqrt"
        book.note("scheduler.type", "not expressible", f"{kind!r}: {known}")
        _leftovers(book, f"of {kind}")
        return
    _leftovers(book, "no scheduler.type says what it is of")
    if "optimizer.type" in book and "learning_rate" in train:
        train |= {"schedule": "cosine", "min_learning_rate": train["learning_rate"], "warmup_steps": 0}
        why = "none: a constant rate, unless the program around it has a schedule"
        book.add("scheduler", book.given["optimizer.type"].place, "approximated", why)


def _leftovers(book: InputKeys, why: str) -> None:
    for key in [key for key in book.given if key.startswith("scheduler.") and book.is_open(key)]:
        book.note(key, "not expressible", why)


def _place(book: InputKeys) -> str:
    """Place where the schedule is named, for the defaults of missing keys."""
    return book.given["scheduler.type"].place
