# SPDX-License-Identifier: Apache-2.0
"""Verify a run by its hash chain, and run random stretches between its checkpoints again, bit for bit.

    sporeloom train --data corpus.txt --steps 100 --save-every 20 --audit-every 10 --output-dir out
    sporeloom audit out --segments 3

Exit code 1: a record, a checkpoint, the exported weights, the data or a step is not as the run recorded it. Exit code 2: it
could not be verified.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sporeloom.core.command_line import argument, check_numbers, option, parse_args
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.log import counted
from sporeloom.core.numbers import Natural
from sporeloom.train import audit
from sporeloom.train.audit_chain import Chain
from sporeloom.train.audit_settings import missing_files, settings_problems
from sporeloom.train.audit_weights import verify_weights

MAX_SEED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Flags of `sporeloom audit`."""

    run: Path = argument("folder of a run that was trained with --audit-every")
    segments: Natural = option(
        3,
        "number of stretches between checkpoints that run again, chosen at random; 0: verify records and checkpoints only",
    )
    seed: Natural | None = option(None, "random seed of that choice (default: a new one, which is printed)")
    head: str | None = option(
        None, "hash of the last record, noted when the run ended, which the chain must end with (default: not compared)"
    )


def main(argv: Sequence[str]) -> int:
    config = parse_args(AuditConfig, __doc__, argv)
    check_numbers(config)
    chain = Chain.read(config.run)
    problems = chain.problems or _head_problems(chain, config.head)
    if problems:
        return _report(problems)
    if wrong := settings_problems(chain):
        raise ConfigError(wrong)
    steps, starts = (
        counted(len(each), what, f"{what}s") for each, what in ((chain.steps(), "step"), (chain.starts(), "start"))
    )
    print(f"{chain.path}: {steps}, {starts}: every record is as it was written; head {chain.head}")
    saved, problems, unknown = audit.verify_checkpoints(chain, config.run)
    problems = [*chain.changed_starts(), *problems]
    recorded = sorted({record["step"] for record in chain.steps() if record.get("saved")})
    print(f"checkpoints: {len(saved)} of {len(recorded)} that were saved are there with the recorded content")
    weights = verify_weights(chain, config.run, audit.CHECKPOINTS)
    problems = [*problems, *weights.differences]
    for line in [*weights.verified, *(f"not verified: {what}" for what in [*unknown, *weights.unknown])]:
        print(line)
    if config.segments:
        problems = [*problems, *_run_again(config, chain, saved, bool(problems))]
    return _report(problems)


def _head_problems(chain: Chain, head: str | None) -> list[str]:
    if head is None or chain.head == head:
        return []
    return [f"{chain.path}: ends with hash {chain.head}, not with --head {head}: records were replaced, or are missing"]


def _run_again(config: AuditConfig, chain: Chain, saved: Sequence[int], has_problems: bool) -> list[str]:
    """Run some segments again. Returns what differs.

    Raises:
        ConfigError: nothing can run again; or nothing differs, and not all segments could run.
    """
    if not saved:
        if has_problems:
            return []
        raise ConfigError(
            f"{config.run / audit.CHECKPOINTS}: no checkpoint to run steps from; train with --save-every N, or verify the "
            "records alone with --segments 0"
        )
    found = audit.segments(chain, saved)
    if not found:
        raise ConfigError(
            f"{config.run}: the run was restarted with other settings in every stretch; give --segments 0"
        )
    seed = secrets.randbelow(MAX_SEED) if config.seed is None else config.seed
    chosen = audit.choose(found, config.segments, seed)
    if missing := list(dict.fromkeys(problem for segment in chosen for problem in missing_files(segment.settings))):
        raise ConfigError(missing)
    print(
        f"{len(chosen)} of {counted(len(found), 'stretch', 'stretches')} run again, chosen with --seed {seed}",
        flush=True,
    )
    for what in dict.fromkeys(other for segment in chosen for other in audit.other_versions(segment)):
        print(f"other version: the run was made with {what}")
    data = {segment.settings["train"]["data"]: segment for segment in chosen}  # once, as reading may take long
    if changed := [problem for segment in data.values() for problem in audit.changed_data(segment)]:
        return [f"data: {problem}" for problem in changed]
    problems, failed = list[str](), Problems()
    with audit.scratch_folder() as scratch:
        for segment in chosen:
            differences = failed.of(audit.run_again, chain, config.run, segment, Path(scratch))
            if differences is not None:
                print(f"{segment}: {'not as recorded' if differences else 'bit for bit as recorded'}", flush=True)
                problems += differences
    if failed and not (problems or has_problems):
        raise ConfigError(failed)
    for what in failed:
        print(f"not verified: {what}")
    return problems


def _report(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"differs: {problem}")
    return 1 if problems else 0
