# SPDX-License-Identifier: Apache-2.0
"""Run programs against their tests, several at once, and say what became of each."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from sporeloom.evaluation import sandbox
from sporeloom.evaluation.toolchains import Toolchain

DETAIL_LENGTH = 400


@dataclass(frozen=True)
class Verdict:
    """What became of a program."""

    status: str
    """`passed`, `failed`, `does not compile`, or the limit it broke: `time`, `memory`, `processes`, `output`."""
    detail: str
    """The end of what it printed, unless it passed."""
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def judge(source: str, toolchain: Toolchain, limits: sandbox.Limits, time_s: float) -> Verdict:
    """Compile and run one program, isolated."""
    steps = toolchain.steps(time_s)
    results = sandbox.run(
        {toolchain.file_name: source},
        steps,
        limits,
        toolchain.environment,
        toolchain.needed,
        toolchain.overlays,
    )
    last, seconds = results[-1], sum(result.seconds for result in results)
    complete = len(results) == len(steps)
    if complete and last.ok and toolchain.passed_output in last.output:
        return Verdict("passed", "", seconds)
    if last.broken_limit:
        status = last.broken_limit if complete else f"{last.broken_limit} while compiling"
    elif complete:
        status = "failed"
    else:
        status = "does not compile"
    detail = last.output.strip()[-DETAIL_LENGTH:]
    if complete and last.ok:
        detail = f"{detail}\nended before all tests ran".strip()
    return Verdict(status, detail, seconds)


def judge_all(
    sources: Sequence[str], toolchain: Toolchain, limits: sandbox.Limits, time_s: float, workers: int | None = None
) -> Iterator[tuple[str, Verdict]]:
    """(program, verdict) of each program, as they come; equal programs are run once. `workers`: one a core by default."""
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
    try:
        running = {pool.submit(judge, source, toolchain, limits, time_s): source for source in dict.fromkeys(sources)}
        for future in as_completed(running):
            yield running[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that one of `k` samples passes, unbiased, from `num_passed` of `num_samples` that did.

    Source: Chen et al., Evaluating Large Language Models Trained on Code, 2021, equation 1.
    """
    assert 0 <= num_passed <= num_samples, (num_passed, num_samples)
    assert 1 <= k <= num_samples, (k, num_samples)
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
