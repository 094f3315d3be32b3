# SPDX-License-Identifier: Apache-2.0
"""Flags that every training run has, in the groups that `-h` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sporeloom.core.command_line import option, run_file
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, Rate
from sporeloom.models.config import AttentionKernel, ComputeDtype
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.flags import StateFlags, StrategyFlags

Optimizer = Literal["adamw-original", "adamw", "muon", "sgd", "adafactor", "adafactor-factored"]
MuonScale = Literal["spectral", "shape", "unit-rms"]
MuonIteration = Literal["quintic", "two-phase"]
DEFAULT_FOLDER = Path("out/<date>-<name>")
"""Default of --output-dir: the run gets a folder of its own (`train.folder`)."""


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The length of a run and its output folder."""

    heading: ClassVar[str] = "run"
    common: ClassVar[tuple[str, ...]] = ("output_dir", "steps", "batch_size", "seq_len")

    run: Path | None = run_file()
    output_dir: Path = option(
        DEFAULT_FOLDER,
        "folder for metrics, the resolved configuration and the checkpoint; out/latest links to the newest run "
        "without this flag",
    )
    overwrite: bool = option(False, "replace the run in --output-dir")
    steps: Count = option(50, "number of optimizer steps")
    batch_size: Count = option(8, "number of sequences in one step, over all devices")
    seq_len: Count | None = option(None, "number of tokens in a sequence (default: the model's maximum context length)")
    seed: Natural = option(1, "random seed for initial weights, sample order and dropout")

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the trained model, unsharded, for tools/generate.py and the other tools."""
        return self.output_dir / "checkpoint"

    @property
    def best_dir(self) -> Path:
        """Folder of the model with the lowest validation loss."""
        return self.output_dir / "best_checkpoint"

    @property
    def ema_dir(self) -> Path:
        """Folder of the moving averages of the weights, as a model."""
        return self.output_dir / "ema_checkpoint"

    @property
    def states_dir(self) -> Path:
        """Folder of the training checkpoints, which --resume reads."""
        return self.output_dir / "checkpoints"


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """The training data and its tokenizer."""

    heading: ClassVar[str] = "data"
    common: ClassVar[tuple[str, ...]] = ("data",)

    data: Path = option(..., "training data")
    tokenizer: Path | None = option(
        None,
        "tokenizer of the family: a file or a folder (default: the tokenizer of the token files, or one "
        "trained on the text)",
    )


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Changes to the model's built-in size, and its initial weights."""

    heading: ClassVar[str] = "model"
    common: ClassVar[tuple[str, ...]] = ("from_checkpoint",)

    from_checkpoint: Path | None = option(
        None,
        "checkpoint folder with the initial weights, model configuration and tokenizer (default: random "
        "initial weights)",
    )
    dropout: Rate | None = option(None, "dropout rate (default: from --size)")
    attention: AttentionKernel | None = option(
        None,
        "attention implementation: plain, flash, or auto, which is flash on Ascend where head size, type and "
        "dropout allow it (default: from --size)",
    )
    indexer_loss_coefficient: NotNegative | None = option(
        None,
        "coefficient of the KL loss that alone trains the indexer of sparse attention (DSA); 0: the indexer is frozen "
        "(default: from --size)",
    )
    indexer_dense_warmup: bool = option(
        False,
        "dense warm-up of the indexer of sparse attention: attend to all tokens, and train the indexer alone by its loss, "
        "everything else being frozen",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelFlags(StrategyFlags):
    """Strategy of the run, and its certificate."""

    heading: ClassVar[str] = "parallelism"

    certificate: Path | None = option(
        None,
        "certificate.json of tools/certify.py: refuse to start if anything that it covers has changed; its "
        "hash detects accidental changes and is not a signature (default: none)",
    )
    accumulate: Count = option(
        1,
        "number of gradient accumulation steps, which save memory (with a pipeline: set num_microbatches in "
        "the strategy)",
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags(StateFlags):
    """The optimizer and its maximum learning rate."""

    heading: ClassVar[str] = "optimizer"
    common: ClassVar[tuple[str, ...]] = ("learning_rate",)

    optimizer: Optimizer = option(
        "adamw-original",
        "optimizer: adamw, adamw-original (AdamW without bias correction, as PanGu and CodeGeeX were trained), "
        "muon (orthogonalized momentum for the matrices of layers, adamw for everything else), "
        "adafactor (PaLM), or adafactor-factored (its second moment is kept as row and column means)",
    )
    learning_rate: NotNegative | None = option(None, "maximum learning rate (default: the family's for this size)")
    adam_beta1: Rate = option(0.9, "decay rate of AdamW's first moment")
    adam_beta2: Rate = option(0.95, "decay rate of AdamW's second moment")
    adam_epsilon: NotNegative = option(1e-8, "AdamW's epsilon, added to the square root of the second moment")
    weight_decay: NotNegative = option(
        0.1,
        "weight decay of matrices and embeddings; Adafactor decays all parameters by this times the "
        "squared learning rate (PaLM uses 1)",
    )
    muon_momentum: Rate = option(0.95, "Muon's momentum")
    muon_nesterov: bool = option(True, "use Nesterov momentum in Muon")
    muon_scale: MuonScale = option(
        "spectral",
        "size of Muon's update of a matrix: spectral (square root of the larger of rows and columns), shape (square root of "
        "rows / columns, at least 1) or unit-rms (square root of rows / columns)",
    )
    muon_scale_factor: Positive = option(0.2, "factor of --muon-scale; 0.2 with spectral gives updates of AdamW's size")
    muon_iteration: MuonIteration = option(
        "quintic",
        "Newton-Schulz iterations of Muon: quintic (5 with one set of coefficients) or two-phase (8 with these, then 2 "
        "that converge)",
    )
    muon_adam_factor: Positive = option(1.0, "factor of the learning rate for the parameters that AdamW updates")
    parameter_groups: Path | None = option(
        None,
        "YAML file of groups of parameters with a learning rate factor or weight decay of their own, or frozen "
        "(default: none)",
    )
    max_grad_norm: NotNegative = option(
        1.0, "maximum global norm of the gradients (gradient clipping); 0: report the norm without clipping"
    )


@dataclass(frozen=True, kw_only=True)
class EMAFlags:
    """Moving averages of the weights."""

    heading: ClassVar[str] = "optimizer"

    ema_decay: Rate = option(
        0.0,
        "decay of the exponential moving average (EMA) of the weights, such as 0.999; the averages are written to "
        "ema_checkpoint of the output folder; 0: none",
    )

    def ema_problems(self, strategy: Strategy) -> Iterator[str]:
        """List the problems of these flags under a strategy."""
        if self.ema_decay and strategy.mesh.size > 1 and not strategy.is_spmd:
            yield (
                f"{strategy.at('engine')}: --ema-decay {self.ema_decay:g} is for engine: spmd, not for MindSpore's "
                "partitioner; change either"
            )
        if not (isinstance(self, ValidationFlags) and self.validate_ema):
            return
        if not self.ema_decay:
            yield "--validate-ema: there are no averages without --ema-decay; give it, too"
        if not self.validation_data:
            yield "--validate-ema: there is nothing to validate with; give --validation-data NAME=PATH, too"


@dataclass(frozen=True, kw_only=True)
class ValidationFlags:
    """Losses of texts that are not trained on, and what follows from them."""

    heading: ClassVar[str] = "validation"
    common: ClassVar[tuple[str, ...]] = ("validation_data",)

    validation_data: tuple[str, ...] = option(
        (),
        "NAME=PATH ...: validation sets, each a text or a folder of token files, or for fine-tuning lines like those of "
        "--data; their losses are computed while training and after the last step (default: none)",
    )
    validate_every: Natural = option(0, "interval in steps between validations; 0: after the last step only")
    early_stopping_patience: Natural = option(
        0,
        "number of validations, one after another, without a lower validation loss after which training stops; 0: never",
    )
    keep_best: bool = option(
        False, "keep the model with the lowest validation loss in best_checkpoint of the output folder"
    )
    validate_ema: bool = option(
        False, "with --ema-decay: compute the losses of the moving averages of the weights, too"
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """Number types of the computation, and loss scaling."""

    heading: ClassVar[str] = "precision"

    compute_dtype: ComputeDtype | None = option(None, "number type of matrix products (default: from --size)")
    loss_scale: Positive | None = option(
        None,
        "initial loss scale (default: 2^32 for float16, no scaling for other types)",
    )
    loss_scale_factor: Positive = option(
        2.0,
        "factor of dynamic loss scaling: the scale is divided by it after non-finite gradients "
        "and multiplied by it later",
    )
    loss_scale_window: Natural = option(
        1000, "number of consecutive finite steps after which the loss scale is raised; 0: it is never raised"
    )


@dataclass(frozen=True, kw_only=True)
class FaultFlags:
    """Detection of and recovery from faults in long runs."""

    heading: ClassVar[str] = "faults"

    skip_steps: tuple[str, ...] = option(
        (),
        "steps to skip, as 61-80 or 61: their samples are discarded, no weight is updated, and they count as "
        "steps (default: none)",
    )
    rewind_at_spike: NotNegative = option(
        0.0,
        "go back to the newest checkpoint when a loss is not finite or exceeds this many times the "
        "median of the recent losses, and skip the steps up to there; 0: never",
    )
    max_skipped_steps: Natural = option(
        0,
        "number of consecutive steps that are skipped because their gradients are not finite, before the next one ends the "
        "run; a loss scale that can still be lowered does not count",
    )
    spike_window: Count = option(50, "number of recent losses for that median")
    find_nan: bool = option(
        False, "check the output of every operator on CPU processes and name the first one that is not finite; slow"
    )
    record: Natural = option(
        0,
        "number of last steps whose inputs, received messages and initial parameters CPU processes keep in "
        "OUTPUT_DIR/record, for `sporeloom replay` and `bisect`; 0: none",
    )
    rerun_every: Natural = option(
        0,
        "interval in steps at which a step runs twice from the same state and must give bit-identical results "
        "on every rank; 0: never",
    )
    watchdog_s: Positive = option(
        120.0, "seconds that a collective may take on CPU processes before every rank reports its position"
    )


@dataclass(frozen=True, kw_only=True)
class ElasticFlags:
    """Continuing with fewer devices after some are lost, and with more when they are back."""

    heading: ClassVar[str] = "elastic training"

    elastic: bool = option(
        False,
        "with --launch: when ranks are killed, continue from the newest state on the devices that are left, with the same "
        "global batch",
    )
    elastic_strategies: tuple[Path, ...] = option(
        (),
        "strategies for fewer devices than --strategy has, files or names; the largest that fits is used (default: "
        "--strategy with smaller degrees)",
    )
    min_devices: Count = option(1, "minimum number of devices with which an elastic run continues")
    max_restarts: Natural = option(
        3, "number of restarts after lost ranks, before the next loss ends the run; growing back does not count"
    )
    devices_file: Path | None = option(
        None,
        "file with the number of devices that the run can use, read again whenever it changes; a change makes an elastic "
        "run save and continue with that number (default: those of --strategy that were not lost)",
    )
    memory_save_every: Natural = option(
        1,
        "interval in steps at which an elastic run keeps its state in memory (/dev/shm, two copies at most), so that a lost "
        "rank costs no more steps than that; 0: only checkpoints on disk",
    )
    launch_command: str | None = option(
        None,
        "command that starts the processes of an elastic run, such as `msrun --worker_num={devices} ...`, with {devices}, "
        "{port} and {log_dir} in it; the command of each process is added (default: as --launch does)",
    )

    def elastic_problems(self, is_launched: bool) -> Iterator[str]:
        """List the problems of these flags. `is_launched`: this is a process of a job that an elastic launcher started."""
        if not self.elastic:
            defaults = {field.name: field.default for field in dataclasses.fields(ElasticFlags)}
            for name, default in defaults.items():
                if getattr(self, name) != default:
                    yield f"--{name.replace('_', '-')} is for elastic runs; give --elastic, too, or leave it out"
            return
        given: Any = self
        if not (given.launch or is_launched):
            yield (
                "--elastic needs --launch, which starts the processes again; on several servers --launch --launch-command "
                "'srun ...' does (docs/how-to/elastic.md)"
            )
        if given.strategy is None:
            yield "--elastic needs --strategy: one device leaves none to continue with"
        if given.certificate:
            yield f"--certificate {given.certificate}: it covers one strategy, not those of an elastic run; leave either out"
        if not (self.memory_save_every or given.save_every or given.save_minutes):
            yield "--memory-save-every 0: a lost rank would cost all steps; give --save-every or --save-minutes, too"
        if self.launch_command is not None and "{devices}" not in self.launch_command:
            yield f"--launch-command {self.launch_command!r}: write {{devices}} where the number of processes belongs"
        if self.launch_command is not None and not (given.save_every or given.save_minutes):
            yield (
                "--launch-command: its processes may not share this machine's memory, so their states are on disk alone; "
                "give --save-every or --save-minutes"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Saving and resuming the training state."""

    heading: ClassVar[str] = "checkpoints"
    common: ClassVar[tuple[str, ...]] = ("resume",)

    save_every: Natural = option(0, "interval in steps between checkpoints of the full training state; 0: none")
    save_minutes: NotNegative = option(
        0.0, "interval in minutes between checkpoints of the full training state; 0: none"
    )
    keep_last: Natural = option(0, "number of checkpoints to keep, the newest ones; 0: all")
    async_save: bool = option(
        False, "continue training while a checkpoint is written; needs memory for one copy of the state"
    )
    resume: bool | Path = option(
        False,
        "resume from the newest complete checkpoint of the run in this folder, on any mesh; without a folder, "
        "the run in --output-dir or out/latest",
    )
