# SPDX-License-Identifier: Apache-2.0
"""Flags of the hash chain of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sporeloom.core.command_line import option
from sporeloom.core.numbers import Natural
from sporeloom.train.audit_chain import FILE


@dataclass(frozen=True, kw_only=True)
class AuditFlags:
    """The hash chain over steps, which `sporeloom audit` verifies."""

    heading: ClassVar[str] = "checkpoints"

    audit_every: Natural = option(
        0,
        "write a hash chain of samples, losses and configuration of every step to audit.jsonl of the output folder, with "
        "hashes of weights and optimizer state at checkpoints and every N steps, for `sporeloom audit`; 0: none",
    )
    stop_after: Natural = option(
        0, "save the state and stop after this step, as after SIGTERM; --resume continues from there; 0: do not stop"
    )

    @property
    def has_data_ids(self) -> bool:
        """Whether all sequences are of the data, rather than sampled from the model."""
        given: Any = self
        return not given.samples_texts

    def audit_problems(self, output_dir: Path) -> Iterator[str]:
        """List the problems of these flags."""
        given: Any = self
        if self.stop_after > given.steps:
            yield f"--stop-after {self.stop_after}: the run has {given.steps} steps; give one of those"
        if not self.audit_every:
            if given.resume and (output_dir / FILE).exists():
                yield f"--resume: {output_dir / FILE} would end here; give --audit-every as before"
            return
        if not self.has_data_ids:
            yield (
                f"--audit-every {self.audit_every}: {given.task} trains on texts that the model samples, which have no "
                "data ids; leave it out"
            )
        if given.elastic:
            yield (
                f"--audit-every {self.audit_every}: an elastic run changes its mesh between checkpoints, so its steps "
                "cannot run again bit for bit; leave --elastic out"
            )
