# SPDX-License-Identifier: Apache-2.0
"""Lengths of drafts that pay: from the measured times of steps and drafts, and from how many drafted tokens were right."""

from __future__ import annotations

from dataclasses import dataclass, field

KEPT = 0.95
"""Weight of what was measured before, against 1 of a new measurement."""
PROBE_EVERY = 32
"""Steps without drafts, where none pays, after which one is tried: texts change."""
FEW = 2
"""Measurements of each kind that an estimate needs; until then drafts are as long as they may be."""


@dataclass
class _Line:
    """Seconds = `fixed` + `each` x number of tokens, by nonnegative least squares with weights that decay."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, tokens: float, seconds: float) -> None:
        new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self.sums = [KEPT * old + value for old, value in zip(self.sums, new, strict=True)]

    def seconds(self, tokens: float) -> float:
        count, x, xx, y, xy = self.sums
        spread = count * xx - x * x
        each = max(0.0, (count * xy - x * y) / spread) if spread > 1e-6 * count * xx else 0.0
        fixed = (y - each * x) / count
        return fixed + each * tokens if fixed >= 0 else xy / xx * tokens


class DraftLength:
    """Chooses the number of drafted tokens of a step with the most tokens per second.

    A draft of k tokens, each right with probability p after right ones, gives p + p^2 + ... + p^k further tokens. It costs k
    steps of the draft model, and a longer step of the model that verifies it.
    """

    def __init__(self) -> None:
        self._step, self._draft = _Line(), _Line()
        self._right = self._wrong = 0.0
        self._num_steps = self._num_drafts = self._num_idle = 0

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """A step of the model computed so many tokens, those of drafts among them."""
        self._step.add(num_tokens, seconds)
        self._num_steps += 1

    def drafted(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """A draft for so many rows took so many steps of the draft model."""
        for _ in range(num_steps):
            self._draft.add(num_rows, seconds / num_steps)
        self._num_drafts += 1

    def verified(self, num_drafted: int, num_right: int) -> None:
        """So many tokens of a draft were right, and the next one, if there was one, was wrong."""
        self._num_idle = 0
        self._right = KEPT * self._right + num_right
        self._wrong = KEPT * self._wrong + (num_right < num_drafted)

    def best(self, num_rows: int, most: int) -> int:
        """The length with the most tokens per second for so many rows, from 0 to `most`."""
        if min(self._num_steps, self._num_drafts) < FEW or self._right + self._wrong == 0:
            return most
        probability = self._right / (self._right + self._wrong)
        per_draft_step = self._draft.seconds(num_rows)

        def speed(length: int) -> float:
            tokens = num_rows * sum(probability**place for place in range(length + 1))
            return tokens / (self._step.seconds(num_rows * (1 + length)) + length * per_draft_step)

        if length := max(range(most + 1), key=speed):
            return length
        self._num_idle += 1  # until a draft is verified: the draft model may have prompts to read before
        return min(1, most) if self._num_idle > PROBE_EVERY else 0
