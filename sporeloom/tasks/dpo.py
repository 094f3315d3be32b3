# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization: the reference log-probabilities are computed once and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_atomically
from sporeloom.data.examples import example_batch
from sporeloom.nn.objectives import Objective, Preference
from sporeloom.parallel.step import TrainStep
from sporeloom.tasks.preference import PairTask, both
from sporeloom.tasks.tuning import batches_of


class DPO(PairTask):
    """The reference is the model the run begins with: nothing of it is kept but the log-probabilities of the pairs."""

    objective: type[Objective] = Preference
    flags: tuple[str, ...] = ("loss_type", "beta", "label_smoothing")
    reference: NDArray[np.float32]
    """(pairs, 2): sums over the trained tokens of each text."""
    _saved_hash: str | None = None
    """Hash of the values that the run began with, where it is resumed."""

    def loss(self) -> nn.Cell:
        return Preference(self.config.loss_type, self.config.beta, self.config.label_smoothing)

    @property
    def _kept(self) -> Path:
        path: Path = self.config.output_dir / "reference.npy"
        return path

    def begin(self, step: TrainStep, steps_done: int) -> None:
        if steps_done:
            if not self._kept.is_file():
                raise ConfigError(f"{self._kept} is missing: the reference log-probabilities of the run; start anew")
            try:
                self.reference = np.load(self._kept, allow_pickle=False)
            except (OSError, EOFError, ValueError) as error:
                raise ConfigError(f"{self._kept}: cannot be read: {error}; start anew") from None
            if self.reference.shape != (self.num_samples, 2):
                raise ConfigError(f"{self._kept}: is not of this run's {self.num_samples} pairs; start anew")
            if self._saved_hash not in (None, _hash(self.reference)):
                raise ConfigError(
                    f"{self._kept}: not as the run wrote it (its hash differs); restore it, or start anew"
                )
            return
        size, length = 2 * self.config.batch_size, self.run.seq_len
        sums = list[NDArray[np.float32]]()
        for real, batch in batches_of(both(self.pairs), size, lambda part: example_batch([[e] for e in part], length)):
            log_probs = self.evaluated(self.net, batch)
            sums.append((log_probs * batch.loss_weights).sum(1)[:real])
        self.reference = np.concatenate(sums).reshape(-1, 2)
        if self.engine.rank == 0:
            write_atomically(self._kept, self._write)

    def state(self) -> dict[str, Any]:
        found = getattr(self, "reference", None)  # not yet known where the state of a run to resume is compared
        return {} if found is None else {"reference": _hash(found)}

    def restore(self, state: dict[str, Any]) -> None:
        self._saved_hash = state.get("reference")

    def _write(self, path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, self.reference)

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        batch = example_batch([[example] for example in both(self.drawn(step))], self.run.seq_len)
        reference = self.at_first(batch.loss_weights, self.known(step).reshape(-1))
        return [*batch._replace(loss_weights=batch.loss_weights / np.float32(self.config.batch_size)), reference]

    def known(self, step: int) -> NDArray[np.float32]:
        """Reference log-probabilities of the pairs of a step, (pairs, 2); 0 before `begin`, to compile for."""
        found: NDArray[np.float32] = getattr(self, "reference", np.zeros((self.num_samples, 2), np.float32))
        return found[self.samples(step)]

    @staticmethod
    def at_first(mask: NDArray[np.float32], sums: NDArray[np.float32]) -> NDArray[np.float32]:
        """Array of the shape of `mask` with the sum of each row at its first trained token: rows are added up."""
        first, found = np.argmax(mask > 0, axis=1), np.zeros_like(mask)
        found[np.arange(len(first)), first] = sums
        return found


def _hash(reference: NDArray[np.float32]) -> str:
    return hashlib.sha256(reference.tobytes()).hexdigest()


TASK = DPO
