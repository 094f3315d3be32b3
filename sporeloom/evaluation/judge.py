# SPDX-License-Identifier: Apache-2.0
"""Run programs against their tests, several at once, and classify the results."""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from sporeloom.evaluation import sandbox
from sporeloom.evaluation.checks import Program
from sporeloom.evaluation.toolchains import COMPILE_S, Toolchain

DETAIL_LENGTH = 400


@dataclass(frozen=True)
class Verdict:
    """Result of a program."""

    status: str
    """`passed`, `failed`, `does not compile`, `the tests do not compile`, or the limit it broke: `time`, `memory`,
    `processes`, `output`."""
    detail: str
    """The end of its output, unless it passed."""
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass(frozen=True)
class BuiltTests:
    """The compiled tests of a problem, ready to run for each of its solutions."""

    files: Mapping[str, str | bytes]
    failure: Verdict | None = None
    """Reason why they do not compile."""


def build_tests(tests: str, toolchain: Toolchain, limits: sandbox.Limits) -> BuiltTests:
    """Compile the program of the tests."""
    if not toolchain.compile:
        return BuiltTests({toolchain.file_name: tests})
    results, kept = sandbox.run_job(toolchain.job(tests, toolchain.compile_steps(), limits, keep=toolchain.compiled))
    last = results[-1]
    if last.ok and kept:
        return BuiltTests(kept)
    status = f"{last.broken_limit or ''} the tests do not compile".strip()
    return BuiltTests({}, Verdict(status, _end(last), last.seconds))


def judge(
    program: Program, toolchain: Toolchain, limits: sandbox.Limits, time_s: float, built: BuiltTests | None = None
) -> Verdict:
    """Run a solution and its tests, each isolated, a pipe in both directions between them.

    A solution has passed if the tests came to their end: there they print a word of this run that nobody else knows.
    """
    built = built or build_tests(program.tests, toolchain, limits)
    if built.failure:
        return built.failure
    calls, results = os.pipe(), os.pipe()
    nonce = secrets.token_hex(16)
    tests_time_s = COMPILE_S + time_s + sandbox.GRACE_S  # they wait for the solution, which has its own limit
    testing_job = toolchain.job(
        built.files,
        [toolchain.execute_step(tests_time_s)],
        limits,
        environment={"SPORELOOM_NONCE": nonce},
        channel=(results[0], calls[1]),
    )
    steps = [*toolchain.compile_steps(), toolchain.execute_step(time_s, wait_s=sandbox.GRACE_S)]
    answering_job = toolchain.job(program.solution, steps, limits, channel=(calls[0], results[1]))
    with ThreadPoolExecutor(1) as other:
        testing = other.submit(sandbox.run_job, testing_job)
        answers, _ = sandbox.run_job(answering_job)
        (test,), _ = testing.result()
    return _verdict(answers, len(steps), test, nonce)


def _verdict(answers: Sequence[sandbox.StepResult], num_steps: int, test: sandbox.StepResult, nonce: str) -> Verdict:
    """Verdict from the ends of the solution and of its tests."""
    last, seconds = answers[-1], sum(result.seconds for result in answers)
    if len(answers) < num_steps:
        status = f"{last.broken_limit} while compiling" if last.broken_limit else "does not compile"
        return Verdict(status, _end(last), seconds)
    if last.broken_limit:
        return Verdict(last.broken_limit, _end(last), seconds)
    if test.ok and test.output.rstrip().endswith(nonce):
        return Verdict("passed", "", seconds)
    detail = f"{_end(last)}\n{_end(test)}".strip()[-DETAIL_LENGTH:]
    return Verdict(test.broken_limit or "failed", detail, seconds)


def _end(result: sandbox.StepResult) -> str:
    return result.output.strip()[-DETAIL_LENGTH:]


class _Builds:
    """The tests that are still needed, each compiled once, by the first who asks."""

    def __init__(self, programs: Sequence[Program], toolchain: Toolchain, limits: sandbox.Limits):
        self._lock = threading.Lock()
        self._left = Counter(program.tests for program in programs)
        self._built: dict[str, Future[BuiltTests]] = {}
        self._toolchain, self._limits = toolchain, limits

    def judge(self, program: Program, time_s: float) -> Verdict:
        try:
            return judge(program, self._toolchain, self._limits, time_s, self._of(program.tests))
        finally:
            with self._lock:
                self._left[program.tests] -= 1
                if not self._left[program.tests]:
                    self._built.pop(program.tests, None)

    def _of(self, tests: str) -> BuiltTests:
        with self._lock:
            is_first = tests not in self._built
            future = self._built.setdefault(tests, Future())
        if is_first:
            try:
                future.set_result(build_tests(tests, self._toolchain, self._limits))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def judge_all(
    programs: Sequence[Program],
    toolchain: Toolchain,
    limits: sandbox.Limits,
    time_s: float,
    workers: int | None = None,
) -> Iterator[tuple[Program, Verdict]]:
    """Yield (program, verdict) of each program as it finishes; equal programs run once. `workers`: one a core by
    default."""
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
    different = list(dict.fromkeys(programs))
    builds = _Builds(different, toolchain, limits)
    try:
        running = {pool.submit(builds.judge, program, time_s): program for program in different}
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
