# SPDX-License-Identifier: Apache-2.0
"""Prepare raw text as token files, and inspect the samples of a run.

    sporeloom preprocess filter INPUT... --out clean.jsonl --min-chars 100 --scripts han latin
    sporeloom preprocess dedup BEST.jsonl OTHER.jsonl --out unique/
    sporeloom preprocess dedup-substrings INPUT... --out unique.jsonl --min-length 200
    sporeloom preprocess decontaminate INPUT... --evaluation TEST.jsonl --evaluation-keys prompt --out training.jsonl
    sporeloom preprocess tokenize INPUT... --tokenizer vocab.model --out tokens/
    sporeloom preprocess difficulty tokens/ --metric vocabularyrarity --seq-len 1024 --out rarity.npz
    sporeloom preprocess inspect THE FLAGS OF tools/train.py --step 100 --rows 0 1
    sporeloom preprocess to-mindrecord tokens/ train.mindrecord --seq-len 1024
    sporeloom preprocess from-mindrecord train.mindrecord --tokenizer vocab.model --out tokens/
    sporeloom preprocess to-megatron tokens/ corpora/books_text_document
    sporeloom preprocess from-megatron corpora/books_text_document --tokenizer vocab.model --out tokens/

INPUT is .jsonl, also with .gz, .zst, .bz2 or .xz (a field `text`), .parquet or .arrow (a column `text`), .txt (blank lines
between documents), .warc and .wet, also .gz (pages and texts of the web), or a folder, in which each other file is a
document. docs/how-to/preprocess.md has the whole story.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from sporeloom.core.command_line import Overwrite, argument, check_numbers, option, output, output_argument, parse_args
from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.json_text import json_text
from sporeloom.core.numbers import MAX_COUNT, Bounds, Count, Natural, Positive, Probability, Seed, Share
from sporeloom.core.outputs import replacing
from sporeloom.data.cluster import RayCluster, Workers, leave
from sporeloom.data.corpus import CorpusConfig
from sporeloom.data.curriculum import Metric
from sporeloom.data.decontaminate import DecontaminationSettings, make_decontaminator, read_evaluation
from sporeloom.data.dedup import dedup
from sporeloom.data.filters import FilterRules, make_filter
from sporeloom.data.fim import FillInTheMiddle
from sporeloom.data.megatron_files import read_megatron_files, write_megatron_files
from sporeloom.data.mindrecord import COLUMN, read_mindrecord, write_mindrecord
from sporeloom.data.minhash import MinHash
from sporeloom.data.rewrite import SAMPLES, rewrite
from sporeloom.data.sources import SHARD_MB, DocumentSource
from sporeloom.data.staging import staged
from sporeloom.data.stores import DocumentPath
from sporeloom.data.substrings import SubstringSettings, dedup_substrings
from sporeloom.data.tokenize import TokenizeJob, tokenize
from sporeloom.data.tokenizer import special_token
from sporeloom.runtime.environment import prepare_environment
from sporeloom.train.difficulty import write_difficulty
from sporeloom.train.inspection import InspectConfig, describe, inspect

Length = Annotated[int, Bounds(8, MAX_COUNT)]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Common(CorpusConfig):
    workers: Count = option(CORES, "number of processes; the output does not depend on it")
    engine: Literal["local", "ray"] = option(
        "local", "where the processes run; ray: on a Ray cluster, one task for each group of files"
    )
    shard_mb: Positive = option(
        SHARD_MB,
        "size of a group of files in MB; large .jsonl files are split to this size, and a failed group is "
        "repeated alone",
    )
    address: str | None = option(None, "address of the Ray cluster, auto or HOST:PORT (default: one is started here)")
    scratch: Path = option(
        Path(), "folder for files on their way to object storage; the nodes of a cluster must see it, too"
    )

    def engine_for(self, out: Path) -> Workers:
        """Raises:
        ConfigError: an address without --engine ray.
        """
        if self.engine == "local":
            if self.address:
                raise ConfigError("--address is a Ray cluster's: give --engine ray")
            return self.workers
        scratch = out.resolve()
        return RayCluster(self.address, self.workers, scratch.with_name(f".{scratch.name}.shards"))

    def source(self, **more: Any) -> DocumentSource:
        return super().source(shard_mb=self.shard_mb, **more)


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(Common):
    out: DocumentPath = output(..., "folder for the token files")
    model: str = option("pangu", "model family of the tokenizer")
    tokenizer: Path = option(..., "tokenizer of the family: a file or a folder")
    fim_rate: Share = option(0.0, "fraction of documents that are rearranged for fill-in-the-middle training")
    fim_spm_rate: Share = option(0.5, "fraction of those in the order suffix, prefix, middle")
    fim_tokens: tuple[str, ...] = option(
        (), "names or ids of the tokens that precede prefix, suffix and middle (default: none)"
    )
    fim_seed: Seed = option(1, "random seed for which documents are rearranged, and where they are split")


@dataclass(frozen=True, kw_only=True)
class DedupConfig(Common):
    out: DocumentPath = output(..., "folder for the remaining documents, one file for each input, and duplicates.jsonl")
    threshold: Probability = option(0.8, "minimum Jaccard similarity of near-duplicates")
    shingle: Count = option(5, "number of characters in a shingle")
    seed: Seed = option(1, "random seed of the hash functions")


@dataclass(frozen=True, kw_only=True)
class SubstringsConfig(Common):
    out: DocumentPath = output(..., "file for the remaining text: .jsonl, also with .gz, .zst, .bz2 or .xz")
    report: DocumentPath | None = output(None, "file for a report of every removed passage (default: none)")
    min_length: Length = option(200, "minimum number of characters of a repeated passage that is removed")
    min_rest: Natural = option(
        50, "minimum number of characters, without white space, that remain of a shortened document"
    )


@dataclass(frozen=True, kw_only=True)
class DecontaminateConfig(Common):
    evaluation: tuple[Path, ...] = option(..., "files of the evaluation sets")
    evaluation_keys: tuple[str, ...] = option(
        ("text",), "fields of the evaluation sets that must not occur in training"
    )
    out: DocumentPath = output(..., "file for the remaining text: .jsonl, also with .gz, .zst, .bz2 or .xz")
    report: DocumentPath | None = output(
        None, "file for a report of every removed passage, with its evaluation document (default: none)"
    )
    ngram: Count = option(13, "number of consecutive words that make a match")
    margin: Natural = option(200, "number of characters removed on each side of a match")
    min_piece: Natural = option(200, "minimum number of characters of a remaining piece")
    max_pieces: Count = option(10, "maximum number of remaining pieces of a document; it is dropped beyond that")


@dataclass(frozen=True, kw_only=True)
class FilterConfig(Common):
    out: DocumentPath = output(..., "file for the documents that pass: .jsonl, also with .gz, .zst, .bz2 or .xz")
    removed: DocumentPath | None = output(
        None, "file for the documents that fail, with the rules they failed (default: none)"
    )
    samples: DocumentPath | None = output(
        None, "text file with a few documents that failed each rule, to be read (default: none)"
    )
    min_chars: Natural = option(0, "minimum number of characters")
    max_chars: Natural = option(0, "maximum number of characters; 0: no limit")
    min_letters: Share = option(0.0, "minimum fraction of letters among the characters that are not white space")
    scripts: tuple[str, ...] = option((), "scripts of the letters, as in: han latin (default: any)")
    min_script: Share = option(0.5, "minimum fraction of the letters that are of these scripts")
    max_repeated_lines: Share = option(1.0, "maximum fraction of lines that repeat an earlier line of the document")
    max_repeated_ngrams: Share = option(
        1.0, "maximum fraction of 10-word runs that repeat an earlier run of the document"
    )
    rules: tuple[str, ...] = option(
        (), "rules of published corpora: gopher, gopher-repetition, mt-nlg, or single ones (default: none)"
    )
    languages: tuple[str, ...] = option((), "ISO 639-1 codes of the languages that pass, as in: en zh (default: all)")
    min_language: Share = option(0.5, "minimum probability of the language by langid's model")
    edit: Path | None = option(
        None,
        "Python file with a function edit(text), called first: it returns the new text, or None to drop "
        "the document (default: none)",
    )
    classifier: Path | None = option(None, "Python file with a function score(text) (default: none)")
    min_score: float = option(0.0, "minimum score")


@dataclass(frozen=True, kw_only=True)
class DifficultyConfig(Overwrite):
    tokens: Path = argument("folder of token files")
    out: Path = output(..., "file for the index, which a curriculum names: .npz")
    metric: Metric = option(
        "vocabularyrarity",
        "difficulty of a sample: rarity of its tokens, number of tokens without padding, or loss under --checkpoint",
    )
    seq_len: Count = option(1024, "number of tokens in a sequence, as in the run")
    packing: Literal["stream", "best-fit"] = option("stream", "packing of documents into samples, as in the run")
    checkpoint: Path | None = option(None, "folder of the model that computes the loss (default: none)")


@dataclass(frozen=True, kw_only=True)
class ToMindRecordConfig(Overwrite):
    tokens: Path = argument("folder of token files")
    out: Path = output_argument("MindRecord file to write")
    seq_len: Count = option(1024, "number of tokens in a sequence; a record has one more")
    column: str = option(COLUMN, "name of the column")


@dataclass(frozen=True, kw_only=True)
class FromMindRecordConfig(Overwrite):
    files: tuple[Path, ...] = argument("MindRecord files of token ids")
    out: Path = output(..., "folder for the token files")
    model: str = option("pangu", "model family of the tokenizer")
    tokenizer: Path = option(..., "tokenizer that made the ids")
    column: str = option(COLUMN, "name of the column")


@dataclass(frozen=True, kw_only=True)
class ToMegatronConfig:
    tokens: Path = argument("folder of token files")
    prefix: Path = argument("common name of the new .bin and .idx file, which must not exist")


@dataclass(frozen=True, kw_only=True)
class FromMegatronConfig(Overwrite):
    prefix: Path = argument("common name of the .bin and .idx file, without these endings")
    out: Path = output(..., "folder for the token files")
    model: str = option("pangu", "model family of the tokenizer")
    tokenizer: Path = option(..., "tokenizer that made the ids")


def run_tokenize(config: TokenizeConfig) -> dict[str, Any]:
    job = TokenizeJob(config.source(), config.model, config.tokenizer, fill_in_the_middle(config))
    return tokenize(job, config.out, config.engine_for(config.out))


def fill_in_the_middle(config: TokenizeConfig) -> FillInTheMiddle | None:
    """Raises:
    ConfigError: tokens that do not exist.
    """
    if not config.fim_rate:
        return None
    if len(set(config.fim_tokens)) != 3:
        raise ConfigError("--fim-rate needs --fim-tokens PREFIX SUFFIX MIDDLE: names or ids of three different tokens")
    prefix, suffix, middle = (special_token(config.model, config.tokenizer, name) for name in config.fim_tokens)
    return FillInTheMiddle(prefix, suffix, middle, config.fim_rate, config.fim_spm_rate, config.fim_seed)


def run_dedup(config: DedupConfig) -> dict[str, Any]:
    return dedup(
        config.source(),
        config.out,
        MinHash(config.threshold, config.shingle, config.seed),
        config.engine_for(config.out),
    )


def run_substrings(config: SubstringsConfig) -> dict[str, Any]:
    settings = SubstringSettings(config.min_length, config.min_rest)
    return dedup_substrings(config.source(), config.out, settings, config.engine_for(config.out), config.report)


def run_decontaminate(config: DecontaminateConfig) -> dict[str, Any]:
    settings = DecontaminationSettings(config.ngram, config.margin, config.min_piece, config.max_pieces)
    short = read_evaluation(config.evaluation, config.evaluation_keys, config.ngram).num_short  # mistakes come first
    source = config.source()
    make_work = partial(make_decontaminator, source, config.evaluation, config.evaluation_keys, settings)
    report = rewrite(source, config.out, make_work, config.engine_for(config.out), config.report)
    return {**report, "evaluation_documents_too_short": short}


def run_filter(config: FilterConfig) -> dict[str, Any]:
    rules = FilterRules(**{name: getattr(config, name) for name in FilterRules.__dataclass_fields__})
    rules.check()
    source = config.source()
    make_work = partial(make_filter, source, rules, config.removed is not None, SAMPLES if config.samples else 0)
    return rewrite(source, config.out, make_work, config.engine_for(config.out), config.removed, config.samples)


def run_inspect(config: InspectConfig) -> None:
    found = inspect(config)
    print(json_text(found, ensure_ascii=False) if config.json else describe(found, config.tokens))


def run_difficulty(config: DifficultyConfig) -> dict[str, Any]:
    return write_difficulty(config.tokens, config.out, config.metric, config.seq_len, config.packing, config.checkpoint)


def run_to_mindrecord(config: ToMindRecordConfig) -> dict[str, Any]:
    prepare_environment()
    return {"records": write_mindrecord(config.tokens, config.out, config.seq_len, config.column)}


def run_from_mindrecord(config: FromMindRecordConfig) -> dict[str, Any]:
    prepare_environment()
    return {"records": read_mindrecord(config.files, config.out, config.model, config.tokenizer, config.column)}


def run_to_megatron(config: ToMegatronConfig) -> dict[str, Any]:
    return write_megatron_files(config.tokens, config.prefix)


def run_from_megatron(config: FromMegatronConfig) -> dict[str, Any]:
    return read_megatron_files(config.prefix, config.out, config.model, config.tokenizer)


COMMANDS: dict[str, tuple[type, Callable[[Any], dict[str, Any] | None]]] = {
    "filter": (FilterConfig, run_filter),
    "dedup": (DedupConfig, run_dedup),
    "dedup-substrings": (SubstringsConfig, run_substrings),
    "decontaminate": (DecontaminateConfig, run_decontaminate),
    "tokenize": (TokenizeConfig, run_tokenize),
    "difficulty": (DifficultyConfig, run_difficulty),
    "inspect": (InspectConfig, run_inspect),
    "to-mindrecord": (ToMindRecordConfig, run_to_mindrecord),
    "from-mindrecord": (FromMindRecordConfig, run_from_mindrecord),
    "to-megatron": (ToMegatronConfig, run_to_megatron),
    "from-megatron": (FromMegatronConfig, run_from_megatron),
}


def _prepare(config: Common, work: Callable[[Any], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Process documents, whose results may go to object storage."""
    with staged(config, config.scratch) as local:
        report = work(local)
        if config.engine == "ray":
            leave(local.engine_for(local.out))  # type: ignore[attr-defined]
    return report


def main(argv: Sequence[str]) -> None:
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(__doc__)
        return
    if command not in COMMANDS:
        raise ConfigError(f"{command} is unknown{did_you_mean(command, COMMANDS)}; known: {', '.join(COMMANDS)}")
    kind, work = COMMANDS[command]
    config: Any = parse_args(kind, f"tools/preprocess.py {command}\n\n{__doc__}", argv[1:])
    check_numbers(config)
    with replacing(config) if isinstance(config, Overwrite) else nullcontext():
        report = _prepare(config, work) if isinstance(config, Common) else work(config)
    if report is not None:
        print(json_text(report, indent=1, ensure_ascii=False))
