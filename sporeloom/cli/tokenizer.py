# SPDX-License-Identifier: Apache-2.0
"""Train a tokenizer on a corpus of any size, and measure tokenizers.

    sporeloom tokenizer train INPUT... --vocab-size 32000 --model palm --out tokenizer.model
    sporeloom tokenizer stats tokenizer.model INPUT... --model palm --by language --against other.model

INPUT is what `sporeloom preprocess` reads: .jsonl, .parquet, .arrow, .txt, .warc, .wet, compressed, or a folder. `stats`
prints tokens per word (fertility), bytes per token, the share of unknown tokens and the number of documents that the tokens
do not decode to. In scripts without spaces, as Chinese, every letter counts as a word. docs/how-to/tokenizer.md has more.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.core.command_line import argument, check_numbers, option, output, parse_args
from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import print_report
from sporeloom.core.numbers import Count, Natural, Seed
from sporeloom.core.outputs import replacing
from sporeloom.data.corpus import CorpusConfig
from sporeloom.data.passages import MAX_PASSAGE_CHARS, MAX_PASSAGES
from sporeloom.data.tokenizer_report import report, table
from sporeloom.data.tokenizer_statistics import NamedTokenizer, StatisticsJob, count_corpus
from sporeloom.data.tokenizer_training import Kind, TokenizerJob, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig(CorpusConfig):
    out: Path = output(..., "file for the tokenizer: .model for SentencePiece, .json for byte-level BPE")
    vocab_size: Count = option(..., "number of tokens, with special tokens and bytes")
    model: str = option("pangu", "model family whose tokenizer is trained")
    kind: Kind | None = option(
        None, "algorithm (default: unigram for pangu, bpe for palm, byte-level-bpe for codegeex, which has no other)"
    )
    max_passages: Count | None = option(
        None,
        f"maximum number of passages of {MAX_PASSAGE_CHARS} characters that are in memory; of a larger corpus a random "
        f"sample is trained on (default: {MAX_PASSAGES} for SentencePiece, all for byte-level-bpe, which counts words)",
    )
    seed: Seed = option(1, "random seed of the sample")


@dataclass(frozen=True, kw_only=True)
class MeasuredTokenizer:
    """First argument: dataclasses take the fields of the last base first."""

    tokenizer: Path = argument("tokenizer to measure: a file or a folder")


@dataclass(frozen=True, kw_only=True)
class StatsConfig(CorpusConfig, MeasuredTokenizer):
    model: str = option("pangu", "model family of the tokenizer")
    against: Path | None = option(None, "reference tokenizer to compare with (default: none)")
    against_model: str | None = option(None, "model family of the reference tokenizer (default: --model)")
    by: str | None = option(
        None, "field by which documents are grouped, as language or meta.domain (default: one group)"
    )
    by_file: bool = option(False, "group documents by their file")
    workers: Natural = option(0, "number of further processes; 0: this one alone; the result does not depend on it")
    json: Path | None = output(None, "file for all statistics as JSON (default: none)")


def run_train(config: TrainTokenizerConfig) -> None:
    job = TokenizerJob(config.source(), config.model, config.vocab_size, config.kind, config.max_passages, config.seed)
    print(json_text(train_tokenizer(job, config.out), indent=1, ensure_ascii=False))


def run_stats(config: StatsConfig) -> None:
    if config.by is not None and config.by_file:
        raise ConfigError(f"--by {config.by} and --by-file: documents are grouped by one of them; leave the other out")
    if config.against_model and not config.against:
        raise ConfigError(f"--against-model {config.against_model} is the family of --against FILE, which is missing")
    tokenizers = [NamedTokenizer(config.model, config.tokenizer)]
    if config.against:
        tokenizers.append(NamedTokenizer(config.against_model or config.model, config.against))
    # Parts of a file are named after their first byte, so a file that is a group stays in one part.
    source = config.source(shard_mb=math.inf) if config.by_file else config.source()
    job = StatisticsJob(source, tuple(tokenizers), config.by, config.by_file)
    found = report(job, count_corpus(job, config.workers))
    if config.json:
        write_text_atomically(config.json, json_text(found, indent=1) + "\n")  # names of files may be no UTF-8
    print_report(table(found))
    if found["skipped"]:
        print_report("skipped: " + ", ".join(f"{count:,} {why}" for why, count in found["skipped"].items()))


COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "train": (TrainTokenizerConfig, run_train),
    "stats": (StatsConfig, run_stats),
}


def main(argv: Sequence[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    if command not in COMMANDS:
        raise ConfigError(f"{command} is unknown{did_you_mean(command, COMMANDS)}; known: {', '.join(COMMANDS)}")
    kind, work = COMMANDS[command]
    config: Any = parse_args(kind, __doc__, argv[1:])
    check_numbers(config)
    with replacing(config):
        work(config)
    return 0
