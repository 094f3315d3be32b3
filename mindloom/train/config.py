# SPDX-License-Identifier: Apache-2.0
"""What a training run is told, and every mistake in it that can be found before MindSpore is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from mindloom.certificate import check_certificate, vouched_for
from mindloom.checkpoint.io import load_config
from mindloom.checkpoint.manifest import checkpoints
from mindloom.cli import option, run_file
from mindloom.data.blend import BLENDS, BlendEntry, read_blend, short_datasets
from mindloom.data.documents import read_documents
from mindloom.data.sample_order import MOST_STEPS, Sizes, growing_seq_lens, ramped_batch_sizes
from mindloom.data.token_file import is_token_file
from mindloom.data.tokenizer import content_hash, find_tokenizer
from mindloom.errors import ConfigError, Problems
from mindloom.files import unwritable
from mindloom.models.adapters import LoRAConfig
from mindloom.models.config import ComputeDtype, ModelConfig
from mindloom.models.family import config_with_file, family_module, size_config
from mindloom.numbers import Amount, Count, Natural, NotNegative, Positive, Rate, number_problems
from mindloom.reader import Document, fields_from
from mindloom.runtime.environment import is_first_process
from mindloom.strategy.checks import batch_problems, group_problems, launch_problems, model_problems
from mindloom.strategy.config import SINGLE_DEVICE, Strategy
from mindloom.strategy.loader import load_strategy
from mindloom.train.loss_scale import FLOAT16_INITIAL
from mindloom.train.schedules import Schedule

MOST_TOKENS = 1 << 28
"""Of one step: more are a slip of the keyboard."""


class PlainText(NamedTuple):
    """What `mindloom train` reads: one of both."""

    documents: list[str] | None
    """Text that is still to be tokenized."""
    parts: list[BlendEntry] | None
    """Token files."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One training run of any kind."""

    task: ClassVar[str]
    """Module of `mindloom.tasks`."""
    rows_per_unit: ClassVar[int] = 1
    """Sequences for each thing that `batch_size` counts."""

    run: Path | None = run_file()
    data: Path = option(..., "what to train on")
    tokenizer: Path | None = option(
        None,
        "tokenizer of the family (a file, or a folder); without one, the token files' own, or one is trained on the text",
    )
    from_checkpoint: Path | None = option(
        None, "start from the weights of this checkpoint folder, with its model configuration and tokenizer"
    )
    strategy: Path | None = option(None, "strategy file, or the name of a shipped one; without it, one device")
    certificate: Path | None = option(
        None, "certificate.json of tools/certify.py: refuse to start if anything it vouches for has changed"
    )
    output_dir: Path = option(Path("out"), "where metrics, the resolved configuration and the checkpoint go")
    steps: Count = option(50, "optimizer steps")
    batch_size: Count = option(8, "sequences of one step, over all devices")
    seq_len: Count | None = option(None, "tokens of a sequence; the model's longest context without this")
    accumulate: Count = option(
        1, "parts a step's batch is cut into, one after another, to save memory (pipelines: num_microbatches)"
    )
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
    dropout: Rate | None = option(None, "dropout rate; the size's own without it")
    compute_dtype: ComputeDtype | None = option(None, "of matrix products; the size's own without it")
    loss_scale: Positive | None = option(
        None,
        "the loss is multiplied with it and gradients are divided; without it 2^32 for float16 and none for others",
    )
    loss_scale_factor: Positive = option(2.0, "divides the scale when gradients are not finite, and raises it again")
    loss_scale_window: Natural = option(1000, "steps without such gradients after which the scale is raised; 0: never")
    seed: Natural = option(1, "of initial weights, sample order and dropout")
    save_every: Natural = option(0, "steps between checkpoints of the whole training state; 0: none")
    save_minutes: NotNegative = option(0.0, "minutes between such checkpoints; 0: none")
    keep_last: Natural = option(0, "such checkpoints to keep, the newest; 0: all")
    async_save: bool = option(False, "go on training while a checkpoint is written; takes memory for one copy")
    resume: bool = option(False, "go on from the newest complete checkpoint in --output-dir, on any mesh")
    launch: bool = option(False, "start msrun with the strategy's number of processes on this machine")

    @property
    def checkpoint_dir(self) -> Path:
        """The trained model, whole, for tools/generate.py and the other tools."""
        return self.output_dir / "checkpoint"

    @property
    def states_dir(self) -> Path:
        """Checkpoints of the training state, which --resume reads."""
        return self.output_dir / "checkpoints"

    def base_model(self) -> tuple[str, ModelConfig]:
        """Family and configuration of the model.

        Raises:
            ConfigError: there is none, or what is wrong with it.
        """
        raise NotImplementedError

    def model_name(self) -> str:
        """For people."""
        raise NotImplementedError

    def read_data(self, model: ModelConfig | None, seq_len: int) -> Any:
        """What the task trains on, as far as it can be read and checked without a tokenizer.

        Raises:
            ConfigError: what is wrong with it.
        """
        raise NotImplementedError

    def sizes(self, seq_len: int) -> Sizes:
        """How much each step takes.

        Raises:
            ConfigError: sizes that are impossible.
        """
        return Sizes((self.rows_per_unit * self.batch_size,), (seq_len,))

    def default_rates(self) -> tuple[float, float]:
        """Highest and lowest learning rate where the command line says none."""
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        """What is wrong with the task's own flags."""
        return iter(())

    def adapters(self) -> LoRAConfig | None:
        """Adapters that are trained in place of the model."""
        return None

    def network_config(self, model: ModelConfig) -> ModelConfig:
        """The network that is trained, given the model it begins with."""
        return model


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingConfig):
    """The flags of `mindloom train`: a model of plain text."""

    task: ClassVar[str] = "pretraining"

    model: str = option("pangu", "model family")
    size: str = option("tiny", "one of the family's published sizes")
    config: Path | None = option(None, "JSON file with fields of the model configuration that replace the size's own")
    data: Path = option(
        ...,
        "what to train on: a folder of token files, a .yaml file that blends several, or text as it is (.jsonl with a `text` "
        "field, .txt with blank lines between documents, ...)",
    )
    batch_size_ramp: tuple[Amount, ...] = option(
        (), "START INCREMENT COUNT: grow from START to --batch-size by INCREMENT, evenly over the first COUNT sequences"
    )
    ramp_unit: Literal["sequences", "tokens"] = option("sequences", "what COUNT of --batch-size-ramp counts")
    seq_len_growth: tuple[str, ...] = option((), "LENGTH:STEPS ...: shorter sequences for the first steps")

    def base_model(self) -> tuple[str, ModelConfig]:
        model = size_config(self.model, self.size)
        if self.from_checkpoint:
            family, model = load_config(self.from_checkpoint)
            if family != self.model:
                raise ConfigError(
                    f"--from-checkpoint {self.from_checkpoint}: a checkpoint of {family}; give --model {family}"
                )
        return self.model, config_with_file(self.config, model, self.model) if self.config else model

    def model_name(self) -> str:
        return f"{self.model} {self.size}"

    def read_data(self, model: ModelConfig | None, seq_len: int) -> PlainText:
        if self.data.suffix not in BLENDS and not is_token_file(self.data):
            return PlainText(read_documents(self.data), None)
        parts = read_blend(self.data)
        if model and (problems := _data_problems(self, model, parts, seq_len)):
            raise ConfigError(problems)
        return PlainText(None, parts)

    def default_rates(self) -> tuple[float, float]:
        rates: tuple[float, float] = family_module(self.model, "config").LEARNING_RATES[self.size]
        return rates

    def sizes(self, seq_len: int) -> Sizes:
        return _sizes(self, seq_len)


@dataclass(frozen=True)
class Run:
    """A training configuration that was found right, with what it refers to."""

    config: TrainingConfig
    family: str
    model: ModelConfig
    strategy: Strategy
    data: Any = dataclasses.field(repr=False)
    """What the configuration's `read_data` returned."""
    lora: LoRAConfig | None
    sizes: Sizes
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    decay_steps: int
    loss_scale: float | None
    """At the beginning; None: gradients are computed of the loss itself."""

    @property
    def seq_len(self) -> int:
        """Of the longest sequences."""
        return self.sizes.longest


def check(config: TrainingConfig, num_processes: int | None) -> Run:
    """Everything the run refers to, read and held against each other.

    `num_processes`: launched already; None: as many as the strategy needs will be.

    Raises:
        ConfigError: all problems at once.
    """
    problems = Problems()
    family, model = problems.of(_model_config, config) or ("", None)
    if family:
        config = problems.of(_with_own_tokenizer, config, family) or config
    problems += _own_problems(config)
    problems += config.problems()
    strategy = problems.of(load_strategy, config.strategy) if config.strategy else SINGLE_DEVICE
    if config.tokenizer and not config.tokenizer.exists():
        problems.append(f"--tokenizer {config.tokenizer}: there is no such tokenizer")
    seq_len = (model.seq_len if model else 0) if config.seq_len is None else config.seq_len
    if model and seq_len > model.seq_len:
        problems.append(f"--seq-len {seq_len} is outside 1 .. {model.seq_len}, the model's longest context")
    is_sized = config.batch_size > 0 and seq_len > 0 and config.accumulate > 0
    sizes = problems.of(config.sizes, seq_len) if is_sized else None
    data = problems.of(config.read_data, model, seq_len)
    lora = problems.of(config.adapters)
    if lora and model:
        problems.of(lora.targets, model)
    loss_scale = config.loss_scale
    if model and model.compute_dtype == "float16" and loss_scale is None:
        loss_scale = FLOAT16_INITIAL
    if loss_scale and config.optimizer.startswith("adafactor"):
        problems.append("--optimizer adafactor knows no loss scale; use bfloat16 or float32, or adamw")
    if strategy:
        problems += _optimizer_problems(config, strategy)
        problems += launch_problems(strategy, num_processes) if num_processes is not None else []
        problems += model_problems(strategy, model) if model else []
        for batch_size, length in sizes.shapes() if sizes else []:
            problems += batch_problems(strategy, batch_size // config.rows_per_unit, length, config.accumulate)
            problems += group_problems(strategy, model, batch_size, length, config.accumulate) if model else []
    if config.certificate and model and strategy:
        vouched = vouched_for(family, model, strategy, config.batch_size, seq_len, config.accumulate)
        problems.of(check_certificate, config.certificate, vouched)
    problems.tell()
    assert model and strategy and sizes
    high, low = config.default_rates()
    return Run(
        config=config,
        family=family,
        model=model,
        strategy=strategy,
        data=data,
        lora=lora,
        sizes=sizes,
        learning_rate=high if config.learning_rate is None else config.learning_rate,
        min_learning_rate=low if config.min_learning_rate is None else config.min_learning_rate,
        warmup_steps=min(2000, config.steps // 10) if config.warmup_steps is None else config.warmup_steps,
        decay_steps=config.decay_steps or config.steps,
        loss_scale=loss_scale,
    )


def _sizes(config: TrainConfig, seq_len: int) -> Sizes:
    """How much each step takes."""
    try:
        growth = [(int(length), int(steps)) for length, steps in (entry.split(":") for entry in config.seq_len_growth)]
        if sum(steps for _, steps in growth) > MOST_STEPS:
            raise ConfigError(f"--seq-len-growth {' '.join(config.seq_len_growth)}: more than {MOST_STEPS:,} steps")
        lengths = growing_seq_lens(growth, seq_len)
    except ValueError as error:
        reason = error if "grow" in str(error) else "give LENGTH:STEPS, as in 256:1000 512:1000"
        raise ConfigError(f"--seq-len-growth {' '.join(config.seq_len_growth)}: {reason}") from None
    batch_sizes: tuple[int, ...] = (config.batch_size,)
    if config.batch_size_ramp:
        ramp = " ".join(map(str, config.batch_size_ramp))
        if len(config.batch_size_ramp) != 3:
            raise ConfigError(f"--batch-size-ramp {ramp}: give START INCREMENT COUNT, as in 16 16 100000")

        def counted(step: int) -> int:
            return lengths[min(step, len(lengths) - 1)] if config.ramp_unit == "tokens" else 1

        start, increment, count = config.batch_size_ramp
        try:
            batch_sizes = ramped_batch_sizes(start, increment, count, config.batch_size, counted)
        except ValueError as error:
            raise ConfigError(f"--batch-size-ramp {ramp}: {error}") from None
    sizes = Sizes(batch_sizes, lengths)
    if (tokens := max(batch * length for batch, length in sizes.shapes())) > MOST_TOKENS:
        raise ConfigError(f"--batch-size {config.batch_size}: {tokens:,} tokens a step are more than {MOST_TOKENS:,}")
    if sizes.problems():
        raise ConfigError([f"--seq-len-growth: {problem}" for problem in sizes.problems()])
    return sizes


def _data_problems(config: TrainConfig, model: ModelConfig, parts: list[BlendEntry], seq_len: int) -> list[str]:
    """Token files against the model."""
    info, problems = parts[0].tokens.info, short_datasets(parts, seq_len)
    if info.family != config.model:
        problems.append(f"{config.data}: tokens of {info.family}, not of --model {config.model}")
    if info.vocab_size > model.vocab_size:
        problems.append(f"{config.data}: {info.vocab_size} tokens do not fit the model's vocab_size {model.vocab_size}")
    if info.eod_id != model.eod_id:
        problems.append(
            f"{config.data}: documents end with token {info.eod_id}, the model's with eod_id {model.eod_id}; set eod_id and "
            "loss_ignore_id in --config"
        )
    if config.tokenizer and config.tokenizer.exists():
        kept = find_tokenizer(info.family, parts[0].tokens.folder)
        if content_hash(config.tokenizer) not in (info.tokenizer, content_hash(kept)):
            problems.append(f"--tokenizer {config.tokenizer} is not the one {config.data} was made with; leave it out")
    return problems


def _with_own_tokenizer(config: TrainingConfig, family: str) -> TrainingConfig:
    """With the tokenizer of the checkpoint it starts from, if no other is named."""
    if config.from_checkpoint is None or config.tokenizer is not None:
        return config
    path = find_tokenizer(family, config.from_checkpoint)
    return dataclasses.replace(config, tokenizer=path) if path.exists() else config


def _model_config(config: TrainingConfig) -> tuple[str, ModelConfig]:
    """Family and network."""
    family, model = config.base_model()
    if config.dropout is not None:
        model = fields_from(ModelConfig, Document("--dropout", {"dropout_rate": config.dropout}), model)
    model = config.network_config(model)
    return family, model if config.compute_dtype is None else dataclasses.replace(
        model, compute_dtype=config.compute_dtype
    )


def _optimizer_problems(config: TrainingConfig, strategy: Strategy) -> Iterator[str]:
    if config.optimizer != "adafactor-factored":
        return
    if strategy.mesh.size > strategy.mesh.dp or strategy.optimizer_parallel:
        yield (
            f"--optimizer adafactor-factored needs whole matrices on every rank: dp alone, without optimizer_parallel, not "
            f"{strategy.mesh}; use adafactor"
        )
    if config.save_every or config.save_minutes or config.resume:
        yield "--optimizer adafactor-factored: its state is not saved; use adafactor, or leave out --save-every and --resume"


def _place_problems(config: TrainingConfig) -> Iterator[str]:
    if problem := unwritable(config.output_dir):
        yield f"--output-dir {problem}"
    elif (config.save_every or config.save_minutes) and (problem := unwritable(config.states_dir)):
        yield problem.replace("no file", "no checkpoint")


def _own_problems(config: TrainingConfig) -> list[str]:
    problems = list(number_problems(config))
    if config.loss_scale_factor <= 1:
        problems.append(f"--loss-scale-factor must be above 1, got {config.loss_scale_factor:g}")
    if config.loss_scale is not None and not 1 <= config.loss_scale <= 2.0**120:
        problems.append(f"--loss-scale must be from 1 to 2^120, got {config.loss_scale:g}")
    place = list(_place_problems(config)) if is_first_process() else []
    problems += place
    has_checkpoints = not place and bool(checkpoints(config.states_dir))
    if config.resume and not has_checkpoints:
        problems.append(f"--resume: {config.states_dir} holds no checkpoint; start without --resume")
    if has_checkpoints and (config.save_every or config.save_minutes) and not config.resume:
        problems.append(
            f"{config.states_dir} holds checkpoints of an earlier run; go on with --resume, or give another --output-dir"
        )
    return problems
