# SPDX-License-Identifier: Apache-2.0
"""MindFormers' learning rate schedules, by their names."""

from __future__ import annotations

from typing import Any

from sporeloom.dialects.settings import InputKeys

CONSTANT, COSINE = ("ConstantWarmUpLR",), ("CosineWithWarmUpLR", None)


def read_schedule(book: InputKeys, section: str, train: dict[str, Any]) -> None:
    """Translate the schedule that `section.type` names, into `train`, after its numbers: a constant is a cosine
    between two equal rates."""
    key, kind = f"{section}.type", book.peek(f"{section}.type")
    if kind in CONSTANT and "learning_rate" in train:
        train |= {"schedule": "cosine", "min_learning_rate": train["learning_rate"]}
        book.note(key, "renamed", "min_learning_rate, as high as learning_rate: constant after the warm-up")
        book.renote(f"{section}.lr_end", "no effect", "the rate is constant")
    elif kind in COSINE:
        book.note(key, "no effect", "a cosine with warm-up")
    else:
        book.note(key, "approximated", f"{kind!r}: a cosine with warm-up; --schedule says which there are")
    if book.peek(f"{section}.warmup_lr_init", 0):
        book.note(f"{section}.warmup_lr_init", "approximated", "the warm-up begins at 0")
    book.note(f"{section}.warmup_lr_init", "same", "the warm-up begins at 0")
    if not book.peek(f"{section}.warmup_ratio", 0):
        book.note(f"{section}.warmup_ratio", "same", "not a fraction of the run")
