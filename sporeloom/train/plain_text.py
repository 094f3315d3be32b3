# SPDX-License-Identifier: Apache-2.0
"""Configuration of `sporeloom train`: a language model on plain text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.numbers import Amount, Count, Natural, parse_ranges
from sporeloom.data.blend import BLENDS, BlendEntry, read_blend, short_datasets
from sporeloom.data.curriculum import read_curriculum
from sporeloom.data.documents import read_documents
from sporeloom.data.megatron import MegatronData, is_megatron, read_megatron
from sporeloom.data.packing import Packing
from sporeloom.data.random_ltd import RandomLTD
from sporeloom.data.sample_order import MAX_STEPS, Sizes, growing_seq_lens, ramped_batch_sizes
from sporeloom.data.streaming import StreamedText
from sporeloom.data.token_file import is_token_file
from sporeloom.data.tokenizer import content_hash, find_tokenizer
from sporeloom.models.config import ModelConfig
from sporeloom.models.config_file import config_with_file, model_folder
from sporeloom.models.family import family_module, size_config
from sporeloom.train.config import TrainingConfig
from sporeloom.train.flags import ValidationFlags
from sporeloom.train.max_logit_flags import MaxLogitFlags
from sporeloom.train.validation_data import check_text, validation_problems


class PlainText(NamedTuple):
    """The data of `sporeloom train`: text or token files."""

    documents: list[str] | None
    """Documents that are not tokenized yet."""
    parts: list[BlendEntry] | None
    """Token files."""
    megatron: MegatronData | None = None
    """Megatron-LM's indexed files, in its own order."""
    stream: StreamedText | None = None
    """Text that is tokenized while the run trains."""


@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    """The size of the network."""

    heading: ClassVar[str] = "model"
    common: ClassVar[tuple[str, ...]] = ("model", "size")

    model: str = option("pangu", "model family")
    size: str = option("tiny", "built-in size of the family")
    config: Path | None = option(
        None, "JSON file of model configuration fields that replace those of --size (default: none)"
    )


@dataclass(frozen=True, kw_only=True)
class RandomLTDFlags:
    """Random layerwise token dropping. Names and schedule follow DeepSpeed."""

    heading: ClassVar[str] = "random layerwise token dropping"

    random_ltd_min_value: Natural = option(
        0,
        "number of tokens in each sequence that the middle layers process at the start of the run, sampled "
        "anew in every step; 0: all",
    )
    random_ltd_require_steps: Count | None = option(
        None, "number of steps after which the middle layers process all tokens (default: --steps)"
    )
    random_ltd_seq_per_step: Count = option(16, "number of tokens by which that number grows")
    random_ltd_layers: tuple[str, ...] = option(
        (), "layers that drop tokens, as 1-22 or 3, counted from 0 (default: all but the first and the last)"
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RandomLTDFlags, MaxLogitFlags, ValidationFlags, SizeFlags, TrainingConfig):
    """The flags of `sporeloom train`."""

    task: ClassVar[str] = "pretraining"
    heading: ClassVar[str] = "data"

    data: Path = option(
        ...,
        "training data: a folder of token files, a .yaml file that blends several or names files of Megatron-LM, or text "
        "(.jsonl with a "
        "`text` field, .txt with blank lines between documents, ...)",
    )
    key: str = option("text", "with --streaming: column of tables and field of JSON lines with the text")
    split: str | None = option(
        None,
        "with --streaming: split of a dataset, by a word in the names of its files or folders (default: all files)",
    )
    streaming: bool = option(
        False,
        "tokenize the text of --data, such as Parquet files or a dataset that Hugging Face datasets saved, while training: "
        "no token files are made",
    )
    shuffle_block: Count = option(
        1024, "with --streaming: number of sequences that are shuffled together, and kept in memory"
    )
    packing: Packing = option(
        "stream",
        "packing of documents into sequences: stream (windows over all tokens), shuffled (documents in a new order "
        "each epoch), or best-fit (a document that fits into a sequence is not split; the remaining positions "
        "are padding)",
    )
    curriculum: Path | None = option(
        None,
        "YAML file of the curriculum: the samples that each step may use, by an index of sporeloom "
        "preprocess difficulty (default: none)",
    )
    batch_size_ramp: tuple[Amount, ...] = option(
        (),
        "START INCREMENT COUNT: increase the batch size from START to --batch-size in steps of INCREMENT, "
        "evenly over the first COUNT sequences (default: constant)",
    )
    ramp_unit: Literal["sequences", "tokens"] = option("sequences", "unit of COUNT in --batch-size-ramp")
    seq_len_growth: tuple[str, ...] = option(
        (), "LENGTH:STEPS ...: shorter sequences for the first steps (default: constant)"
    )
    data_budget: bool = option(False, "print the samples of each dataset that the run would use, without training")

    def base_model(self) -> tuple[str, ModelConfig]:
        if model_folder(self.model):
            raise ConfigError(
                f"--model {self.model}: a folder, not a family; give --from-checkpoint {self.model} to start from its "
                f"weights, or --config {self.model} to start from random weights, and --model for the family"
            )
        model = size_config(self.model, self.size)
        if self.from_checkpoint:
            family, model = load_config(self.from_checkpoint)
            if family != self.model:
                raise ConfigError(
                    f"--from-checkpoint {self.from_checkpoint}: a checkpoint of {family}; give --model {family}"
                )
        return self.model, config_with_file(self.config, model, self.model) if self.config else model

    @property
    def only_looks(self) -> bool:
        return self.data_budget

    def model_name(self) -> str:
        return f"{self.model} {self.size}"

    def read_data(self, model: ModelConfig | None, seq_len: int) -> PlainText:
        if self.streaming:
            return PlainText(None, None, stream=StreamedText(self.data, self.key, self.split))
        if self.data.suffix not in BLENDS and not is_token_file(self.data):
            return PlainText(read_documents(self.data), None)
        if is_megatron(self.data):
            problems = list(_megatron_problems(self))
            data = read_megatron(self.data)
            if problems:
                raise ConfigError(problems)
            return PlainText(None, None, data)
        parts = read_blend(self.data)
        if model and (problems := _data_problems(self, model, parts, seq_len)):
            raise ConfigError(problems)
        return PlainText(None, parts)

    def default_rates(self) -> tuple[float, float]:
        rates: tuple[float, float] = family_module(self.model, "config").LEARNING_RATES[self.size]
        return rates

    def sizes(self, seq_len: int) -> Sizes:
        return _sizes(self, seq_len)

    def problems(self) -> Iterator[str]:
        yield from validation_problems(self, check_text)
        yield from _streaming_problems(self)
        if self.packing == "best-fit" and self.seq_len_growth:
            yield "--packing best-fit: sequences of one length only; leave out --seq-len-growth"
        if self.curriculum:
            found = Problems()
            found.of(read_curriculum, self.curriculum)
            yield from found
            if self.packing == "shuffled":
                yield f"--curriculum {self.curriculum}: shuffled documents make other samples in each epoch"
            if self.data.suffix in BLENDS:
                yield f"--curriculum {self.curriculum}: of one dataset only, not of a blend"

    def random_ltd(self, model: ModelConfig, sizes: Sizes) -> RandomLTD | None:
        given = parse_ranges("--random-ltd-layers", self.random_ltd_layers, "layers", 0)
        if not self.random_ltd_min_value:
            if given or self.random_ltd_require_steps:
                raise ConfigError("--random-ltd-layers and --random-ltd-require-steps need --random-ltd-min-value")
            return None
        return RandomLTD(
            layers=tuple(sorted({layer for part in given for layer in part}) or range(1, model.num_layers - 1)),
            num_layers=model.num_layers,
            min_value=self.random_ltd_min_value,
            max_value=sizes.longest,
            require_steps=self.random_ltd_require_steps or self.steps,
            seq_per_step=self.random_ltd_seq_per_step,
        )


def _streaming_problems(config: TrainConfig) -> Iterator[str]:
    """List the flags that text which is tokenized while training leaves no choice for."""
    if not config.streaming:
        given = {
            "--key": config.key != "text",
            "--split": config.split is not None,
            "--shuffle-block": config.shuffle_block != type(config).shuffle_block,
        }
        yield from (f"{flag}: is read with --streaming alone; give it, too" for flag, is_it in given.items() if is_it)
        return
    if config.tokenizer is None:
        yield "--streaming: the text is not read before the run; give a --tokenizer, or a checkpoint that has one"
    if config.data.suffix in BLENDS or is_token_file(config.data):
        yield f"--streaming: {config.data} is tokenized already; leave --streaming out"
    wrong = {
        "--packing": config.packing != "stream",
        "--curriculum": config.curriculum is not None,
        "--seq-len-growth": bool(config.seq_len_growth),
        "--data-budget": config.data_budget,
    }
    yield from (
        f"{flag}: needs token files, which --streaming does not make; leave either out" for flag in wrong if wrong[flag]
    )


def _megatron_problems(config: TrainConfig) -> Iterator[str]:
    """List the flags that the order of Megatron-LM's samples leaves no choice for."""
    why = f"{config.data}: samples come in Megatron-LM's order"
    if config.tokenizer is None:
        yield f"{config.data}: files of Megatron-LM name no tokenizer; give the one that made them with --tokenizer"
    if config.packing != "stream":
        yield f"--packing {config.packing}: {why}; leave it out"
    if config.seq_len_growth:
        yield f"--seq-len-growth: {why}, which has one length; leave it out"
    if config.data_budget:
        yield f"--data-budget, inspect: {why}; both read token files alone, which `preprocess from-megatron` makes"


def _sizes(config: TrainConfig, seq_len: int) -> Sizes:
    """The batch size and sequence length of each step."""
    try:
        growth = [(int(length), int(steps)) for length, steps in (entry.split(":") for entry in config.seq_len_growth)]
        if sum(steps for _, steps in growth) > MAX_STEPS:
            raise ConfigError(f"--seq-len-growth {' '.join(config.seq_len_growth)}: more than {MAX_STEPS:,} steps")
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
    if sizes.problems():
        raise ConfigError([f"--seq-len-growth: {problem}" for problem in sizes.problems()])
    return sizes


def _data_problems(config: TrainConfig, model: ModelConfig, parts: list[BlendEntry], seq_len: int) -> list[str]:
    """Check the token files against the model."""
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
    problems += [
        f"{config.data}: {part.name}, domain {problem}"
        for part in parts
        if part.domain is not None and (problem := model.domain_problem(part.domain))
    ]
    if config.tokenizer and config.tokenizer.exists():
        kept = find_tokenizer(info.family, parts[0].tokens.folder)
        if content_hash(config.tokenizer) not in (info.tokenizer, content_hash(kept)):
            problems.append(f"--tokenizer {config.tokenizer} is not the one {config.data} was made with; leave it out")
    return problems
