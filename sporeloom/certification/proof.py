# SPDX-License-Identifier: Apache-2.0
"""Train scaled-down strategies on processes of this machine, and compare every number with one device."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.certification.shrink import FULL_MESH, SUBJECT
from sporeloom.core.lines import split_lines
from sporeloom.core.processes import end_with_parent
from sporeloom.runtime.launch import failure_report, launch
from sporeloom.strategy.config import Strategy

WORKER = Path(__file__).with_name("worker.py")
ONE_DEVICE = "one_device"
TIMEOUT_S = 1200
LIMITS = {"losses": 1e-5, "norms": 1e-4, "gradients": 1e-5, "weights": 1e-5}
"""Tolerances. Losses and gradient norms: relative. Gradients: relative to the largest entry of all, and ten times that to the
largest of the same parameter. Weights: absolute, and at most 1 % of how far the parameter moved. Both have a floor, below
which there is rounding alone: a parameter that hardly matters must be right, too."""
GRADIENT_FLOOR, WEIGHT_FLOOR = 0.1, 0.1
"""Share of a tolerance that a parameter with the smallest gradients, or steps, has."""

Numbers = dict[str, dict[str, Any]]
Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Trained:
    """Results of a training: numbers by optimizer, gradients of the first step, weights after SGD."""

    numbers: Numbers
    gradients: Tensors
    weights: Tensors


@dataclass(frozen=True)
class Proof:
    """Comparison of one scaled-down mesh with one device."""

    mesh: str
    differences: dict[str, float] = field(default_factory=dict)
    """Largest difference of each kind, as in `LIMITS`."""
    losses: list[float] = field(default_factory=list)
    """Losses of AdamW, then of SGD."""
    failure: str = ""
    """First quantity that differs, or the reason why the job ended; empty if all is equal."""


def prove(folder: Path, small: Sequence[Strategy], logs: Path) -> tuple[list[float], list[Proof]]:
    """Train the subject in `folder` (subject.json and its files) under every scaled-down strategy.

    Returns:
        The losses of one device, and the proofs. There are fewer of them if a job ended early.
    """
    if failure := _alone(folder, [ONE_DEVICE], "one device", logs / "one_device.log"):
        return [], [Proof(ONE_DEVICE, failure=failure)]
    expected, proofs = load(folder, ONE_DEVICE), []
    for size in sorted({strategy.mesh.size for strategy in small}):
        numbers = [n for n, strategy in enumerate(small) if strategy.mesh.size == size]
        failure = _job(folder, numbers, size, small, logs / f"{size}_processes")
        for number in numbers:
            mesh = str(small[number].mesh)
            if not is_complete(folder, str(number)):
                proofs.append(Proof(mesh, failure=failure or "a process left without its results"))
                break
            proofs.append(compare(mesh, expected, load(folder, str(number))))
    return _losses(expected), proofs


def compile_ranks(folder: Path, ranks: Sequence[int], logs: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Partition ranks of the custom network in `folder` under the full strategy, in one process.

    Returns:
        The reports of the ranks, and the problems: without any there is a report of each rank, or else none.
    """
    numbers = ",".join(map(str, ranks))
    if failure := _alone(folder, [FULL_MESH, numbers], f"ranks {numbers} of the full mesh", logs / "full_mesh.log"):
        return [], [failure]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks], []


def _alone(folder: Path, words: Sequence[str], what: str, log: Path) -> str:
    """Run the worker in one process. Returns the reason why it failed, or ''."""
    log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    with log.open("w") as output, contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, str(WORKER), str(folder / "subject.json"), *words],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
            preexec_fn=lambda: end_with_parent(parent),
        )
        if done.returncode == 0:
            return ""
        return f"{what} failed ({log}): {_last_line(log.read_text(errors='replace'))}"
    return f"{what} did not end within {TIMEOUT_S} s ({log})"


def _job(folder: Path, numbers: Sequence[int], size: int, small: Sequence[Strategy], logs: Path) -> str:
    """Run the scaled-down strategies of `size` processes in turn, in one job. Returns why it ended early, or ''."""
    arguments = [str(folder / "subject.json"), ",".join(map(str, numbers))]
    # Failures are reported in the certificate; the output of the job is discarded.
    with io.TextIOWrapper(io.BytesIO()) as discarded, redirect_stdout(discarded), redirect_stderr(discarded):
        code = launch(str(WORKER), arguments, size, logs, small[numbers[0]].mesh.first_rank_of_last_stage, SUBJECT)
    return "" if code == 0 else _last_line(failure_report(logs))


def _last_line(text: str) -> str:
    """Find the line of a traceback or message that says what happened."""
    lines = [line.strip() for line in split_lines(text) if line.strip() and not line.startswith("-")]
    errors = [line for line in lines if "Error: " in line or line.startswith("error: ")]
    return (errors or lines or ["without a message"])[-1][:400]


def is_complete(folder: Path, name: str) -> bool:
    """Whether a training left all of its files."""
    return all((folder / f"{name}.{o}.{suffix}").exists() for o in ("AdamW", "SGD") for suffix in ("json", "npz"))


def load(folder: Path, name: str) -> Trained:
    """Read the files that a training left."""
    numbers = {o: json.loads((folder / f"{name}.{o}.json").read_text()) for o in ("AdamW", "SGD")}
    tensors = []
    for optimizer in ("AdamW", "SGD"):
        with np.load(folder / f"{name}.{optimizer}.npz") as archive:
            tensors.append({n: archive[n] for n in archive.files})
    return Trained(numbers, *tensors)


def _losses(trained: Trained) -> list[float]:
    return [loss for numbers in trained.numbers.values() for loss in numbers["losses"]]


def compare(mesh: str, expected: Trained, got: Trained) -> Proof:
    """Compare all numbers, in the order in which a fault shows: the loss of a step, its gradients, what follows from them."""
    found: dict[str, float] = {}
    failure = ""
    for kind, quantity, difference, shown in _compared(expected, got):
        found[kind] = max(found.get(kind, 0.0), difference) if np.isfinite(difference) else float("inf")
        if not failure and not difference <= LIMITS[kind]:
            failure = f"{quantity}: {shown} (difference {difference:.1e}, at most {LIMITS[kind]:.0e})"
    return Proof(mesh, found, _losses(got), failure)


def _compared(expected: Trained, got: Trained) -> Iterator[tuple[str, str, float, str]]:
    """Yield (kind, quantity, difference, both values)."""
    for step in range(len(expected.numbers["AdamW"]["losses"])):
        yield from _numbers("losses", f"loss of step {step + 1}", expected, got, step)
        if step == 0:
            largest = max(float(np.abs(value).max()) for value in expected.gradients.values()) or 1.0
            scales = {name: _gradient_scale(value, largest) for name, value in expected.gradients.items()}
            yield from _tensors("gradients", "gradient of", expected.gradients, got.gradients, scales, "adam_m.")
        yield from _numbers("norms", f"gradient norm of step {step + 1}", expected, got, step)
    moved = expected.numbers["SGD"]["moved"]
    scales = {name: _weight_scale(value, moved[name]) for name, value in expected.weights.items()}
    yield from _tensors("weights", "after 5 steps of SGD", expected.weights, got.weights, scales, "")


def _gradient_scale(gradient: NDArray[Any], largest: float) -> float:
    return min(largest, max(10 * float(np.abs(gradient).max(initial=0)), GRADIENT_FLOOR * largest))


def _weight_scale(weight: NDArray[Any], moved: float) -> float:
    rounding = 8 * float(np.finfo(np.float32).eps * np.abs(weight).max(initial=0))
    return min(1.0, max(0.01 * moved / LIMITS["weights"], rounding / LIMITS["weights"], WEIGHT_FLOOR))


def _numbers(kind: str, word: str, expected: Trained, got: Trained, step: int) -> Iterator[tuple[str, str, float, str]]:
    for optimizer, numbers in expected.numbers.items():
        a, b = numbers[kind][step], got.numbers[optimizer][kind][step]
        yield kind, f"{word}, {optimizer}", abs(b - a) / (abs(a) or 1.0), _both(a, b)


def _tensors(
    kind: str,
    word: str,
    expected: Tensors,
    got: Tensors,
    scales: Mapping[str, float],
    prefix: str,
) -> Iterator[tuple[str, str, float, str]]:
    """Yield the largest difference of each tensor, divided by its scale."""
    for name, value in expected.items():
        found = got.get(name)
        if found is None or found.shape != value.shape:
            yield kind, f"{word} {name.removeprefix(prefix)}", float("inf"), "missing, or of another shape"
            continue
        difference = np.abs(found - value)
        index = np.unravel_index(int(np.argmax(difference)), value.shape) if value.ndim else ()
        shown = _both(float(value[index]), float(found[index])) + f" at {[int(i) for i in index]}"
        yield kind, f"{word} {name.removeprefix(prefix)}", float(difference.max()) / scales[name], shown


def _both(one_device: float, mesh: float) -> str:
    return f"{mesh:.7g}, on one device {one_device:.7g}"


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Measure the time of a block."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = round(time.perf_counter() - start, 1)
