# SPDX-License-Identifier: Apache-2.0
"""Writes the hash chain of a run while it trains. All ranks take part; the logging rank has the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sporeloom.checkpoint.sharded import LocalTensor
from sporeloom.core.json_text import json_text
from sporeloom.runtime.engine import Engine
from sporeloom.train.audit_chain import START, ChainFile, Record, State, digest, part_digests, state_of_parts
from sporeloom.train.config import Run
from sporeloom.train.metrics import StepMetrics

Slices = Mapping[str, LocalTensor]


class AuditWriter:
    """The records of a run.

    Args:
        settings: the settings that the run really uses, and what its data are.
        snapshot: gives this rank's slices of the state.
        sample_ids: gives the samples of a step, counted from 0.
        steps_done: of a run that is resumed.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        settings: Mapping[str, Any],
        snapshot: Callable[[], Slices],
        sample_ids: Callable[[int], Any],
        steps_done: int,
    ):
        self.every, self.engine = run.config.audit_every, engine
        self.saves, self.num_steps = bool(run.config.save_every or run.config.save_minutes), run.config.steps
        self.settings = json.loads(json_text(settings))
        self.snapshot, self.sample_ids = snapshot, sample_ids
        self.configuration = digest(self.settings)
        self.file = ChainFile(run.config.output_dir, steps_done) if engine.is_log_rank else None
        self._pending: Record | None = None
        self._start(steps_done)

    def begin(self, metrics: StepMetrics) -> None:
        """Take down a step; it is written with its state, before a checkpoint of it, or by `end`."""
        self._pending = {"step": metrics.step, "configuration": self.configuration}
        if self.file:
            values = {"loss": metrics.loss, "grad_norm": metrics.grad_norm}
            self._pending |= {"samples": self.sample_ids(metrics.step - 1), **values}

    def before_saving(self, step: int, slices: Slices | None) -> None:
        """Write the record of a step whose state is about to be saved. `slices`: None after an error, which other ranks may
        not have, so that they take no part; the record is then without a state."""
        if self._pending and self._pending["step"] == step:
            self._write({} if slices is None else {"state": self._state(slices), "saved": True})

    def end(self, is_last: bool) -> None:
        """Write the record of the step, if it is not written."""
        if not self._pending:
            return
        if is_last or self._pending["step"] % self.every == 0:
            saved = {"saved": True} if is_last and self.saves else {}  # the last state is saved next
            self._write({"state": self._state(self.snapshot()), **saved})
        else:
            self._write({})

    def skip(self, step: int) -> None:
        """Take down a step that is skipped; it is written like others."""
        self._pending = {"step": step, "configuration": self.configuration, "skipped": True}

    def rewind(self, steps_done: int, step: int) -> None:
        """Take back the records after `steps_done`, whose state is there again: the steps up to `step` count as skipped."""
        self._pending = None
        if self.file:
            self.file.take_back(steps_done)
        self._start(steps_done)
        for skipped in range(steps_done + 1, step + 1):
            self.skip(skipped)
            if skipped < self.num_steps:  # the state of the last one may be saved next
                self.end(False)

    def _start(self, steps_done: int) -> None:
        self._pending = {"step": steps_done, START: self.settings}
        self._write({"state": self._state(self.snapshot())})

    def _write(self, more: Record) -> None:
        if self.file and self._pending:
            self.file.append({**self._pending, **more})
        self._pending = None

    def _state(self, slices: Slices) -> State:
        """Hashes of the state's tensors, over all ranks."""
        own = part_digests(slices)
        ranks = range(self.engine.strategy.mesh.size)
        return state_of_parts(
            [self.engine.broadcast_value(own if rank == self.engine.rank else None, rank) for rank in ranks]
        )
