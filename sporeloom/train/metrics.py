# SPDX-License-Identifier: Apache-2.0
"""Metrics of each step: a line of metrics.jsonl, the trackers, the progress bar."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import file_lines
from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.experts import ExpertConfig
from sporeloom.train.trackers import Tracker

SHOWN = {
    "dropped_tokens": "{} dropped",
    "rewards/accuracies": "accuracy {:.2f}",
    "reward": "reward {:.3f}",
    "kl": "KL {:.4f}",
}
"""The task's metrics that the progress bar shows."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step."""

    step: int
    """Step number, counted from 1."""
    loss: float
    """NaN, in the file null: a spike that made the weights NaN, too."""
    learning_rate: float
    grad_norm: float | None
    """Global norm before clipping; None: not finite, so that no weight was updated and the loss scale was lowered."""
    step_time_s: float
    tokens_per_s: float
    """Tokens per second of all devices together."""
    loss_scale: float | None = None
    """Loss scale of this step, where there is one."""
    tokens_per_s_per_device: float | None = None
    """Tokens per second divided by the number of devices."""
    flops_per_s_per_device: float | None = None
    """FLOP/s of one device: forward and backward pass of the model, without recomputation."""
    mfu: float | None = None
    """Model FLOPs utilization: these FLOP/s as a fraction of the peak of `--chip`."""
    hfu: float | None = None
    """Hardware FLOPs utilization: the same with recomputed FLOPs."""
    predicted_step_time_s: float | None = None
    """Predicted `step_time_s`, from `--predicted`."""
    compute_s: float | None = None
    """Seconds of the step in which the logging rank computes."""
    communication_s: float | None = None
    """Seconds of the step in which it communicates and does not compute (exposed communication); CPU processes alone."""
    data_s: float | None = None
    """Seconds of the step in which it waits for its batch; of `grpo`, `ppo` and `distill --lmbda` mainly sampling."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further metrics of the task."""

    def values(self) -> dict[str, Any]:
        """The metrics that are present."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "more"}
        return {name: value for name, value in {**given, **self.more}.items() if value is not None}


def expert_metrics(counts: NDArray[np.float32], experts: ExpertConfig) -> dict[str, Any]:
    """Metrics of what the layers of experts counted in a step: (layers, E + 2), see `sporeloom.nn.router_losses.LoadCounter`.

    `dropped_tokens`: choices that found no room at their expert, in all layers. `busiest_expert`: tokens given to the expert
    that was given most, in the layer where that is most: times what balance would give it. `router_entropy`: of the
    probabilities of a token's experts, mean over tokens and layers, in nats; a hash router has none.
    """
    given, dropped, entropy = counts[:, :-2], counts[:, -2], counts[:, -1]
    tokens = given.sum(1) / experts.experts_per_token
    told = {
        "dropped_tokens": round(float(dropped.sum())),
        "busiest_expert": float((given.max(1) / given.mean(1)).max()),
    }
    return told if experts.router == "hash" else {**told, "router_entropy": float((entropy / tokens).mean())}


def layer_metrics(counts: NDArray[np.float32], model: ModelConfig, has_logits: bool = False) -> dict[str, Any]:
    """Metrics of what layers counted in a step: those with experts, those whose indexer is trained, and with `has_logits` the
    largest attention logits.

    `indexer_loss`: KL divergence of the attention from the indexer in nats, without its coefficient, mean over the tokens
    that are trained on and over layers.
    """
    indexers = sum(map(model.has_indexer, range(model.num_layers))) if model.trains_indexer else 0
    logits = 3 * (model.num_layers + model.num_mtp_layers) if has_logits else 0
    of_experts, of_indexers, of_logits = np.split(counts, [len(counts) - logits - indexers, len(counts) - logits])
    told: dict[str, Any] = {"indexer_loss": float(of_indexers.mean())} if indexers else {}
    if logits:
        told |= _logit_metrics(of_logits.reshape(-1, 3))
    if not model.experts:
        return told
    return expert_metrics(of_experts.reshape(-1, model.experts.num_experts + 2), model.experts) | told


def _logit_metrics(counts: NDArray[np.float32]) -> dict[str, Any]:
    """Metrics of the largest logits of attentions: each its largest, the number of its head, and how many heads QK-clip
    scales; one of multi-token prediction comes after the layers of the model."""
    layer = int(counts[:, 0].argmax())
    return {
        "max_attention_logit": float(counts[layer, 0]),
        "max_attention_logit_layer": layer,
        "max_attention_logit_head": round(float(counts[layer, 1])),
        "clipped_heads": round(float(counts[:, 2].sum())),
    }


def _lines_up_to(step: int, path: Path) -> list[str]:
    """Metrics of earlier runs, up to a step; the last line may be cut off."""
    kept = []
    for line in file_lines(path):
        try:
            if json.loads(line)["step"] > step:
                break
        except ValueError:
            break
        kept.append(line)
    return kept


class MetricsWriter:
    """Writes the metrics of one run; used by one rank. A context manager.

    `steps_done`: of a run that is resumed; what was noted of later steps is taken back. `trackers`: they get the metrics,
    too, and raise nothing.
    """

    def __init__(self, folder: Path, total_steps: int, steps_done: int = 0, trackers: Sequence[Tracker] = ()):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = path = folder / "metrics.jsonl"
        kept = _lines_up_to(steps_done, path) if steps_done and path.exists() else []
        write_text_atomically(path, "".join(line + "\n" for line in kept))
        self._lines = path.open("a", encoding="utf-8")
        self._trackers = trackers
        self._bar = tqdm(
            total=total_steps,
            initial=steps_done,
            unit="step",
            file=sys.stdout,
            ascii=True,
            mininterval=1.0,
            dynamic_ncols=True,
        )

    def write(self, metrics: StepMetrics) -> None:
        values = metrics.values()
        try:
            self._lines.write(json_text(values) + "\n")
            self._lines.flush()
        except OSError as error:
            raise ConfigError(f"{self._path}: step {metrics.step} cannot be written: {error.strerror}") from None
        step = values.pop("step")
        for tracker in self._trackers:
            tracker.log(step, values)
        told = "".join(f", {text.format(metrics.more[name])}" for name, text in SHOWN.items() if name in metrics.more)
        told += "" if metrics.loss_scale is None else f", scale {metrics.loss_scale:g}"
        self._bar.set_postfix_str(f"loss {metrics.loss:.4f}{told}, {metrics.tokens_per_s:.0f} tokens/s", refresh=False)
        self._bar.update()

    def pass_over(self) -> None:
        """Record a skipped step."""
        self._bar.update()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        with contextlib.suppress(OSError):  # what is not written was reported above
            self._lines.close()
