# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization: the reference log-probabilities are computed once and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.align.preferences import Floats, PairTotals, dpo_losses
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_atomically
from sporeloom.data.examples import Pair, example_batch
from sporeloom.nn.objectives import Objective, Preference
from sporeloom.parallel.step import TrainStep
from sporeloom.tasks.preference import PairTask, both
from sporeloom.tasks.tuning import batches_of

FILE, HELD_OUT_FILE = "reference.npy", "reference-{}.npy"
NOT_BEGUN_WITH = (
    "the run began without this set, so that its log-probabilities by the initial model are not known; leave it out, or "
    "start anew"
)


class DPO(PairTask):
    """The reference is the model the run begins with: nothing of it is kept but the log-probabilities of the pairs."""

    objective: type[Objective] = Preference
    flags: tuple[str, ...] = ("loss_type", "beta", "label_smoothing")
    reference: NDArray[np.float32] | None = None
    """(pairs, 2): sums over the trained tokens of each text; None before `begin`."""
    held_out: dict[str, NDArray[np.float32]]
    """The same of validation sets, by their content."""
    _saved: Mapping[str, Any] = MappingProxyType({})
    """Hashes of the values that the run began with, where it is resumed."""

    def loss(self) -> nn.Cell:
        return Preference(self.config.loss_type, self.config.beta, self.config.label_smoothing)

    def begin(self, step: TrainStep, steps_done: int) -> None:
        folder, saved = self.config.output_dir, self._saved
        sets = {each.content: each.pairs for each in self.sets.values()}
        self.held_out = {}
        if steps_done:
            hashes = saved.get("held_out", {})
            if new := [name for name, each in self.sets.items() if each.content not in hashes]:
                raise ConfigError([f"--validation-data {name}=...: {NOT_BEGUN_WITH}" for name in new])
            self.reference = _read(folder / FILE, self.num_samples, saved.get("reference"))
            for content, pairs in sets.items():
                self.held_out[content] = _read(folder / HELD_OUT_FILE.format(content), len(pairs), hashes[content])
            return
        self.reference = self._sums(self.pairs)
        self._keep(folder / FILE, self.reference)
        for content, pairs in sets.items():
            self.held_out[content] = self._sums(pairs)
            self._keep(folder / HELD_OUT_FILE.format(content), self.held_out[content])

    def _sums(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Log-probabilities of the texts of pairs by the present weights, (pairs, 2)."""
        sums = list[NDArray[np.float32]]()
        for real, batch in batches_of(both(pairs), 2 * self.config.batch_size, self.rows):
            log_probs = self.evaluated(self.net, batch)
            sums.append((log_probs * batch.loss_weights).sum(1)[:real])
        return np.concatenate(sums).reshape(-1, 2)

    def _keep(self, path: Path, reference: NDArray[np.float32]) -> None:
        def write(partial: Path) -> None:
            with partial.open("wb") as file:
                np.save(file, reference)

        if self.engine.rank == 0:
            write_atomically(path, write)

    def state(self) -> dict[str, Any]:
        if self.reference is None:  # where the state of a run to resume is compared
            return {}
        earlier = self._saved.get("held_out", {})  # a set that is left out now may be given again
        held_out = {**earlier, **{content: _hash(values) for content, values in self.held_out.items()}}
        return {"reference": _hash(self.reference), **({"held_out": held_out} if held_out else {})}

    def restore(self, state: dict[str, Any]) -> None:
        self._saved = state

    def pair_losses(self, pairs: Sequence[Pair], totals: PairTotals, content: str) -> tuple[Floats, Floats]:
        config, reference = self.config, self.held_out[content].astype(np.float64)
        return dpo_losses(totals, reference, config.loss_type, config.beta, config.label_smoothing)

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        batch = example_batch([[example] for example in both(self.drawn(step))], self.run.seq_len)
        reference = self.at_first(batch.loss_weights, self.known(step).reshape(-1))
        return [*batch._replace(loss_weights=batch.loss_weights / np.float32(self.config.batch_size)), reference]

    def known(self, step: int) -> NDArray[np.float32]:
        """Reference log-probabilities of the pairs of a step, (pairs, 2); 0 before `begin`, to compile for."""
        found = np.zeros((self.num_samples, 2), np.float32) if self.reference is None else self.reference
        return found[self.samples(step)]

    @staticmethod
    def at_first(mask: NDArray[np.float32], sums: NDArray[np.float32]) -> NDArray[np.float32]:
        """Array of the shape of `mask` with the sum of each row at its first trained token: rows are added up."""
        first, found = np.argmax(mask > 0, axis=1), np.zeros_like(mask)
        found[np.arange(len(first)), first] = sums
        return found


def _read(path: Path, num_pairs: int, saved_hash: str | None) -> NDArray[np.float32]:
    """Read the reference log-probabilities that a run has kept.

    Args:
        saved_hash: None where an earlier release did not save it.

    Raises:
        ConfigError: they are not there, or not those.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing: reference log-probabilities of the run; restore it, or start anew")
    try:
        reference: NDArray[np.float32] = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; start anew") from None
    if reference.shape != (num_pairs, 2):
        raise ConfigError(f"{path}: is not of this run's {num_pairs} pairs; start anew")
    if saved_hash not in (None, _hash(reference)):
        raise ConfigError(f"{path}: not as the run wrote it (its hash differs); restore it, or start anew")
    return reference


def _hash(reference: NDArray[np.float32]) -> str:
    return hashlib.sha256(reference.tobytes()).hexdigest()


TASK = DPO
