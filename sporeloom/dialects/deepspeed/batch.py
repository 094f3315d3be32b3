# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's three sizes of a batch, of which the third follows from two: train_batch_size =
train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas."""

from __future__ import annotations

from typing import Any

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.dialects.deepspeed.keys import whole
from sporeloom.dialects.settings import InputKeys

TOTAL, MICRO, PARTS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def batch(book: InputKeys, train: dict[str, Any], replicas: int) -> None:
    """Put `batch_size` and `accumulate` into `train`.

    Raises:
        ConfigError: invalid values, values that contradict each other or the flags, or too few of them.
    """
    problems = Problems()
    total, micro, parts = (_size(book, key, problems) for key in (TOTAL, MICRO, PARTS))
    flags = {TOTAL: train.get("batch_size"), PARTS: train.get("accumulate")}
    for key, value in ((TOTAL, total), (PARTS, parts)):
        if value and flags[key] not in (None, value):
            name = "--batch-size" if key == TOTAL else "--accumulate"
            problems.append(f"{book.given[key].place}: {key} is {value}, but {name} is {flags[key]}")
    problems.raise_if_any()
    total, parts = total or flags[TOTAL], parts or flags[PARTS]
    if not parts and total and micro:
        if total % (micro * replicas):
            raise ConfigError(_contradiction(book, total, micro, None, replicas))
        parts = total // (micro * replicas)
    problems.of(_ask, book, total, micro, parts)
    problems.raise_if_any()
    if total is None and micro:
        total = micro * (parts or 1) * replicas
    if total is not None and total != (micro or total // (replicas * (parts or 1))) * (parts or 1) * replicas:
        raise ConfigError(_contradiction(book, total, micro, parts, replicas))
    if total is not None:
        train["batch_size"] = total
    if parts and (parts > 1 or PARTS in book):
        train["accumulate"] = parts
    book.note(TOTAL, "renamed", "--batch-size")
    book.note(PARTS, "renamed", "--accumulate")
    if micro and PARTS not in book:
        book.note(MICRO, "renamed", f"--accumulate {parts or 1}")


def _size(book: InputKeys, key: str, problems: Problems) -> int | None:
    value = book.peek(key)
    if value is None or value == "auto":
        return None
    try:
        return whole(value)
    except (TypeError, ValueError, OverflowError):
        problems.append(f"{book.given[key].place}: {key} must be a number of at least 1, got {value!r}")
        return None


def _ask(book: InputKeys, total: int | None, micro: int | None, parts: int | None) -> None:
    """Raises:
    ConfigError: sizes that are left open, and no others that they follow from.
    """
    is_open = [key for key in (TOTAL, MICRO, PARTS) if book.peek(key) == "auto"]
    if not is_open or sum(size is not None for size in (total, micro, parts)) >= 2:
        return
    if total:
        needed = "--accumulate"
    elif micro:
        needed = "--batch-size or --accumulate"
    else:
        needed = "--batch-size" if parts else "--batch-size and --accumulate"
    number = "a number" if len(is_open) == 1 else "numbers"
    raise ConfigError(
        f"{book.given[is_open[0]].place}: {' and '.join(is_open)} must be {number}, got 'auto', which the Hugging Face "
        f"trainer fills in; give {needed}"
    )


def _contradiction(book: InputKeys, total: int, micro: int | None, parts: int | None, replicas: int) -> str:
    place = next((book.given[key].place for key in (TOTAL, MICRO, PARTS) if key in book), "")
    told = " x ".join(f"{name} {value}" for name, value in ((MICRO, micro), (PARTS, parts)) if value)
    told += f"{' x ' if told else ''}{replicas} replicas"
    what = (
        f"is not {told} = {(micro or 1) * (parts or 1) * replicas}"
        if micro and parts
        else f"is not a multiple of {told}"
    )
    return f"{place}: {TOTAL} {total} {what}; change one of them, or --devices"
