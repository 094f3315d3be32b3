# SPDX-License-Identifier: Apache-2.0
"""From raw text to token files, and a look at what a run reads of them.

    mindloom preprocess filter INPUT... --out clean.jsonl --min-chars 100 --scripts han latin
    mindloom preprocess dedup BEST.jsonl OTHER.jsonl --out unique/
    mindloom preprocess decontaminate INPUT... --evaluation TEST.jsonl --evaluation-keys prompt --out training.jsonl
    mindloom preprocess tokenize INPUT... --tokenizer vocab.model --out tokens/
    mindloom preprocess inspect THE FLAGS OF tools/train.py --step 100 --rows 0 1
    mindloom preprocess to-mindrecord tokens/ train.mindrecord --seq-len 1024
    mindloom preprocess from-mindrecord train.mindrecord --tokenizer vocab.model --out tokens/

INPUT is .jsonl, .jsonl.gz or .jsonl.zst (a field `text`), .parquet (a column `text`), .txt (blank lines between documents)
or a folder, in which each other file is a document. docs/guides/data.md has the whole story.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mindloom.cli import argument, check_numbers, option, parse_args
from mindloom.data.decontaminate import DecontaminationSettings, make_decontaminator, read_evaluation
from mindloom.data.dedup import dedup
from mindloom.data.filters import FilterRules, make_filter
from mindloom.data.fim import FillInTheMiddle
from mindloom.data.mindrecord import COLUMN, read_mindrecord, write_mindrecord
from mindloom.data.minhash import MinHash
from mindloom.data.rewrite import rewrite
from mindloom.data.sources import MAX_DOCUMENT_MB, Source
from mindloom.data.tokenize import TokenizeJob, tokenize
from mindloom.data.tokenizer import special_token
from mindloom.errors import ConfigError, did_you_mean
from mindloom.numbers import Count, Natural, Positive, Probability, Seed, Share
from mindloom.runtime.environment import prepare_environment
from mindloom.train.inspection import InspectConfig, describe, inspect

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Common:
    inputs: tuple[Path, ...] = argument("files or folders of documents")
    key: str = option("text", "field of JSON lines, or column of tables, that holds the text")
    suffixes: tuple[str, ...] = option((), "take only files that end so from folders, as in .py .cpp")
    on_error: Literal["stop", "skip"] = option(
        "stop", "what to do with what cannot be read; skip counts it and goes on"
    )
    max_document_mb: Positive = option(MAX_DOCUMENT_MB, "a longer document cannot be read")
    workers: Count = option(CORES, "processes; what is written does not depend on it")

    def source(self) -> Source:
        return Source(self.inputs, self.key, self.suffixes, self.on_error, self.max_document_mb)


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(Common):
    out: Path = option(..., "folder for the token files")
    model: str = option("pangu", "model family, whose tokenizer it is")
    tokenizer: Path = option(..., "tokenizer of the family: a file, or a folder")
    fim_rate: Share = option(0.0, "share of documents rearranged so that a model learns to fill in the middle")
    fim_spm_rate: Share = option(0.5, "share of those in the order suffix, prefix, middle")
    fim_tokens: tuple[str, ...] = option((), "names or ids of the tokens that announce prefix, suffix and middle")
    fim_seed: Seed = option(1, "of which documents, and where they are cut")


@dataclass(frozen=True, kw_only=True)
class DedupConfig(Common):
    out: Path = option(..., "folder for the files of what stays, one for each input, and duplicates.jsonl")
    threshold: Probability = option(0.8, "Jaccard similarity from which documents are near-duplicates")
    shingle: Count = option(5, "characters of the pieces that are compared")
    seed: Seed = option(1, "of the hash functions")


@dataclass(frozen=True, kw_only=True)
class DecontaminateConfig(Common):
    evaluation: tuple[Path, ...] = option(..., "files of the evaluation sets")
    evaluation_keys: tuple[str, ...] = option(("text",), "their fields that must not be seen in training")
    out: Path = option(..., "file for what is left: .jsonl, .jsonl.gz or .jsonl.zst")
    report: Path | None = option(None, "file for every cut: where, what, and of which evaluation document")
    ngram: Count = option(13, "words in a row that both must have")
    margin: Natural = option(200, "characters cut away on each side of a match")
    min_piece: Natural = option(200, "characters of a piece that is kept")
    max_pieces: Count = option(10, "documents that fall into more are dropped")


@dataclass(frozen=True, kw_only=True)
class FilterConfig(Common):
    out: Path = option(..., "file for what passes: .jsonl, .jsonl.gz or .jsonl.zst")
    removed: Path | None = option(None, "file for what does not, with the rules it failed")
    min_chars: Natural = option(0, "characters at least")
    max_chars: Natural = option(0, "characters at most; 0: any number")
    min_letters: Share = option(0.0, "share of letters among what is not white space, at least")
    scripts: tuple[str, ...] = option((), "scripts the letters must be of, as in: han latin")
    min_script: Share = option(0.5, "share of the letters that must be of these scripts")
    max_repeated_lines: Share = option(1.0, "share of lines that were there before in the document, at most")
    max_repeated_ngrams: Share = option(1.0, "share of runs of 10 words that were there before, at most")
    classifier: Path | None = option(None, "Python file with a function score(text)")
    min_score: float = option(0.0, "score at least")


@dataclass(frozen=True, kw_only=True)
class ToMindRecordConfig:
    tokens: Path = argument("folder of token files")
    out: Path = argument("MindRecord file to write")
    seq_len: Count = option(1024, "tokens of a sequence; a record has one more")
    column: str = option(COLUMN, "name of the column")


@dataclass(frozen=True, kw_only=True)
class FromMindRecordConfig:
    files: tuple[Path, ...] = argument("MindRecord files of token ids")
    out: Path = option(..., "folder for the token files")
    model: str = option("pangu", "model family, whose tokenizer made the ids")
    tokenizer: Path = option(..., "that tokenizer")
    column: str = option(COLUMN, "name of the column")


def run_tokenize(config: TokenizeConfig) -> dict[str, Any]:
    job = TokenizeJob(config.source(), config.model, config.tokenizer, fill_in_the_middle(config))
    return tokenize(job, config.out, config.workers)


def fill_in_the_middle(config: TokenizeConfig) -> FillInTheMiddle | None:
    """Raises:
    ConfigError: tokens that are none.
    """
    if not config.fim_rate:
        return None
    if len(set(config.fim_tokens)) != 3:
        raise ConfigError("--fim-rate needs --fim-tokens PREFIX SUFFIX MIDDLE: names or ids of three different tokens")
    prefix, suffix, middle = (special_token(config.model, config.tokenizer, name) for name in config.fim_tokens)
    return FillInTheMiddle(prefix, suffix, middle, config.fim_rate, config.fim_spm_rate, config.fim_seed)


def run_dedup(config: DedupConfig) -> dict[str, Any]:
    return dedup(config.source(), config.out, MinHash(config.threshold, config.shingle, config.seed), config.workers)


def run_decontaminate(config: DecontaminateConfig) -> dict[str, Any]:
    settings = DecontaminationSettings(config.ngram, config.margin, config.min_piece, config.max_pieces)
    short = read_evaluation(config.evaluation, config.evaluation_keys, config.ngram).num_short  # mistakes come first
    source = config.source()
    make_work = partial(make_decontaminator, source, config.evaluation, config.evaluation_keys, settings)
    report = rewrite(source, config.out, make_work, config.workers, config.report)
    return {**report, "evaluation_documents_too_short": short}


def run_filter(config: FilterConfig) -> dict[str, Any]:
    rules = FilterRules(**{name: getattr(config, name) for name in FilterRules.__dataclass_fields__})
    rules.check()
    source = config.source()
    make_work = partial(make_filter, source, rules, config.removed is not None)
    return rewrite(source, config.out, make_work, config.workers, config.removed)


def run_inspect(config: InspectConfig) -> None:
    found = inspect(config)
    print(json.dumps(found, ensure_ascii=False) if config.json else describe(found, config.tokens))


def run_to_mindrecord(config: ToMindRecordConfig) -> dict[str, Any]:
    prepare_environment()
    return {"records": write_mindrecord(config.tokens, config.out, config.seq_len, config.column)}


def run_from_mindrecord(config: FromMindRecordConfig) -> dict[str, Any]:
    prepare_environment()
    return {"records": read_mindrecord(config.files, config.out, config.model, config.tokenizer, config.column)}


COMMANDS: dict[str, tuple[type, Callable[[Any], dict[str, Any] | None]]] = {
    "filter": (FilterConfig, run_filter),
    "dedup": (DedupConfig, run_dedup),
    "decontaminate": (DecontaminateConfig, run_decontaminate),
    "tokenize": (TokenizeConfig, run_tokenize),
    "inspect": (InspectConfig, run_inspect),
    "to-mindrecord": (ToMindRecordConfig, run_to_mindrecord),
    "from-mindrecord": (FromMindRecordConfig, run_from_mindrecord),
}


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
    report = work(config)
    if report is not None:
        print(json.dumps(report, indent=1, ensure_ascii=False))
