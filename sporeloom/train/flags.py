# SPDX-License-Identifier: Apache-2.0
"""Flags that every training run has, in groups; `-h` shows them so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from sporeloom.cli import option, run_file
from sporeloom.models.config import AttentionKernel, ComputeDtype
from sporeloom.numbers import Count, Natural, NotNegative, Positive, Rate
from sporeloom.strategy.flags import StrategyFlags
from sporeloom.train.schedules import Schedule

DEFAULT_FOLDER = Path("out/<date>-<name>")
"""Stands for a folder of the run's own (`train.folder`)."""


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """What is done, and where it goes."""

    heading: ClassVar[str] = "run"
    common: ClassVar[tuple[str, ...]] = ("run", "output_dir", "steps", "batch_size", "seq_len", "seed")

    run: Path | None = run_file()
    output_dir: Path = option(
        DEFAULT_FOLDER,
        "folder for metrics, the resolved configuration and the checkpoint; the newest one made by default is out/latest",
    )
    overwrite: bool = option(False, "replace the run that --output-dir holds")
    steps: Count = option(50, "optimizer steps")
    batch_size: Count = option(8, "sequences of one step, over all devices")
    seq_len: Count | None = option(None, "tokens of a sequence; the model's longest context without this")
    seed: Natural = option(1, "of initial weights, sample order and dropout")

    @property
    def checkpoint_dir(self) -> Path:
        """The trained model, whole, for tools/generate.py and the other tools."""
        return self.output_dir / "checkpoint"

    @property
    def states_dir(self) -> Path:
        """Checkpoints of the training state, which --resume reads."""
        return self.output_dir / "checkpoints"


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What a run learns from."""

    heading: ClassVar[str] = "data"
    common: ClassVar[tuple[str, ...]] = ("data", "tokenizer")

    data: Path = option(..., "what to train on")
    tokenizer: Path | None = option(
        None,
        "tokenizer of the family (a file, or a folder); without one, the token files' own, or one is trained on the text",
    )


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """What the network is, where it differs from its size, and where its weights come from."""

    heading: ClassVar[str] = "model"
    common: ClassVar[tuple[str, ...]] = ("from_checkpoint",)

    from_checkpoint: Path | None = option(
        None, "start from the weights of this checkpoint folder, with its model configuration and tokenizer"
    )
    dropout: Rate | None = option(None, "dropout rate; the size's own without it")
    attention: AttentionKernel | None = option(
        None,
        "plain, flash, or auto: flash on Ascend where head size, type and dropout allow it; the size's own without it",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelFlags(StrategyFlags):
    """Over what the work is spread, and who vouches for that."""

    heading: ClassVar[str] = "parallelism"

    certificate: Path | None = option(
        None,
        "certificate.json of tools/certify.py: refuse to start if anything it vouches for has changed; it guards "
        "against accidents, and is not a signature",
    )
    accumulate: Count = option(
        1, "parts a step's batch is split into, one after another, to save memory (pipelines: num_microbatches)"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """How weights follow from gradients."""

    heading: ClassVar[str] = "optimizer"
    common: ClassVar[tuple[str, ...]] = ("learning_rate",)

    optimizer: Literal["adamw-original", "adamw", "sgd", "adafactor", "adafactor-factored"] = option(
        "adamw-original",
        "adamw-original has no bias correction, as PanGu and CodeGeeX were trained; adafactor is PaLM's; factored it keeps "
        "the second moment's rows and columns only",
    )
    learning_rate: NotNegative | None = option(None, "highest rate; the family's own for this size without it")
    schedule: Schedule = option(
        "cosine", "of the rate; inverse-sqrt is PaLM's: high until --decay-steps, then 1/sqrt(step)"
    )
    min_learning_rate: NotNegative | None = option(None, "rate at the end of the cosine, or the lowest")
    warmup_steps: Natural | None = option(None, "steps of linear warm-up; a tenth of the run, at most 2000, without it")
    decay_steps: Count | None = option(
        None, "step at which the cosine ends, or 1/sqrt(step) begins; the run's last without it"
    )
    adam_beta1: Rate = option(0.9, "decay of AdamW's first moment")
    adam_beta2: Rate = option(0.95, "decay of AdamW's second moment")
    adam_epsilon: NotNegative = option(1e-8, "added to the root of AdamW's second moment")
    weight_decay: NotNegative = option(
        0.1, "on matrices and embeddings; adafactor's, on all, is times the square of the rate, PaLM's 1"
    )
    max_grad_norm: NotNegative = option(1.0, "clip gradients to this global norm; 0 measures it and clips nothing")


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """In what numbers are computed."""

    heading: ClassVar[str] = "precision"

    compute_dtype: ComputeDtype | None = option(None, "of matrix products; the size's own without it")
    loss_scale: Positive | None = option(
        None,
        "the loss is multiplied with it and gradients are divided; without it 2^32 for float16 and none for others",
    )
    loss_scale_factor: Positive = option(2.0, "divides the scale when gradients are not finite, and raises it again")
    loss_scale_window: Natural = option(1000, "steps without such gradients after which the scale is raised; 0: never")


@dataclass(frozen=True, kw_only=True)
class FaultFlags:
    """What is done about faults of large runs."""

    heading: ClassVar[str] = "faults"

    skip_steps: tuple[str, ...] = option(
        (),
        "steps to leave out, as 61-80 or 61: their samples are passed over, nothing is updated, and they count as done",
    )
    rewind_at_spike: NotNegative = option(
        0.0,
        "go back to the newest checkpoint when a loss is not finite or above so many times the median of the last ones, and "
        "leave out the steps up to there; 0: never",
    )
    spike_window: Count = option(50, "losses of which that median is")
    find_nan: bool = option(
        False, "look at what every operator gives, on CPU processes: the first one that is not finite is named; slow"
    )
    rerun_every: Natural = option(
        0,
        "steps between two that are run twice from the same state and must leave the same bits on every rank; 0: none",
    )
    watchdog_s: Positive = option(
        120.0, "seconds in one collective after which every rank says where it is, on CPU processes"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """When the whole training state is saved, and read again."""

    heading: ClassVar[str] = "checkpoints"
    common: ClassVar[tuple[str, ...]] = ("save_every", "resume")

    save_every: Natural = option(0, "steps between checkpoints of the whole training state; 0: none")
    save_minutes: NotNegative = option(0.0, "minutes between such checkpoints; 0: none")
    keep_last: Natural = option(0, "such checkpoints to keep, the newest; 0: all")
    async_save: bool = option(False, "go on training while a checkpoint is written; takes memory for one copy")
    resume: bool | Path = option(
        False,
        "go on from the newest complete checkpoint of the run in this folder, or in --output-dir, or else in out/latest; on "
        "any mesh",
    )
