# SPDX-License-Identifier: Apache-2.0
"""Tokenizing, loading, removing near-duplicates: speed and memory, through the command line a user calls.

Needs ../shared/data (Chinese text) and ../shared/golden (released vocabularies). Writes benchmarks/results/data.md.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from report import write_report

from sporeloom.core.lines import file_lines
from sporeloom.data.loader import Dataset, Loader
from sporeloom.data.packing import Stream
from sporeloom.data.sample_order import Sizes
from sporeloom.data.token_file import TokenFile

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
RESULTS = ROOT / "benchmarks" / "results" / "data.md"
NUM_DOCUMENTS, WORDS, COPIES = 1_000_000, 40, 0.1
BATCH, SEQ_LEN, STEPS = 64, 1024, 200


def preprocess(*arguments) -> tuple[float, float, str]:
    """Seconds of a subcommand, peak memory in GB of it and all it starts, added up, and what it printed."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess.py"), *map(str, arguments)]
    begin, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as out:
        job = subprocess.Popen(command, stdout=out)
        while job.poll() is None:
            peak = max(peak, sum(map(resident_gb, family(job.pid))))
            time.sleep(0.2)
        seconds = time.perf_counter() - begin
        assert job.returncode == 0
        out.seek(0)
        return seconds, peak, out.read()


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(p for child in children for p in family(int(child)))]


def resident_gb(pid: int) -> float:
    """Memory of one process; pages of mapped files, which can be given back at any time, left out."""
    try:
        lines = file_lines(Path(f"/proc/{pid}/status"))
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1e6


def tokenize(folder: Path) -> list[str]:
    poems = SHARED / "data" / "zh_poetry.jsonl"
    chinese = folder / "chinese.jsonl"
    chinese.write_bytes(poems.read_bytes() * 20)
    code = sysconfig.get_paths()["stdlib"]
    jobs = (
        ("Chinese poems (20 copies), PanGu: words, then SentencePiece", 8, chinese, "pangu", "pangu_vocab.model", ()),
        (
            "Python's library and packages, CodeGeeX: byte-level BPE",
            5,
            code,
            "codegeex",
            "codegeex_tokenizer",
            (".py",),
        ),
    )
    lines = ["| Tokenize | MB | s | MB/s | wanted |", "|---|---|---|---|---|"]
    for name, wanted, source, model, vocabulary, suffixes in jobs:
        more = ("--suffixes", *suffixes) if suffixes else ()
        arguments = ("--model", model, "--tokenizer", SHARED / "golden" / vocabulary, "--out", folder / model)
        seconds, _, printed = preprocess("tokenize", source, *arguments, *more, "--on-error", "skip")
        megabytes = json.loads(printed)["text_bytes"] / 1e6
        lines.append(f"| {name} | {megabytes:.0f} | {seconds:.1f} | {megabytes / seconds:.1f} | {wanted} |")
    return [*lines, "", "Of text, in UTF-8; the start of the program and its workers is in the time."]


def load(folder: Path) -> list[str]:
    parts = [TokenFile(folder / name) for name in ("pangu", "codegeex")]
    datasets = [
        Dataset(part.folder.name, part, weight, part.places_of(part.info.eod_id), Stream(part, SEQ_LEN))
        for part, weight in zip(parts, (0.7, 0.3), strict=True)
    ]
    loader = Loader(datasets, Sizes((BATCH,), (SEQ_LEN,)), 1, 9, 9)
    loader.batch(0)
    begin = time.perf_counter()
    for step in range(STEPS):
        loader.batch(step)
    rate = STEPS * BATCH * SEQ_LEN / (time.perf_counter() - begin)
    return [
        "",
        f"Loader, one consumer, a blend of the two (0.7, 0.3), {BATCH} sequences of {SEQ_LEN} tokens, "
        f"inputs, labels, positions and loss weights: {rate / 1e6:.1f} million tokens/s (wanted: 2).",
    ]


def write_documents(path: Path) -> None:
    """Random words; one in ten documents is another with up to eight of its words changed."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 11, 30_000)])
    with path.open("w", encoding="utf-8") as file:
        for _ in range(NUM_DOCUMENTS // 10_000):
            chosen = rng.integers(0, len(words), (10_000, WORDS))
            for copy in np.flatnonzero(rng.random(len(chosen)) < COPIES):
                chosen[copy] = chosen[rng.integers(0, len(chosen))]
                chosen[copy, rng.integers(0, WORDS, rng.integers(0, 9))] = rng.integers(0, len(words))
            file.writelines(json.dumps({"text": " ".join(row)}) + "\n" for row in words[chosen])


def deduplicate(folder: Path) -> list[str]:
    source = folder / "documents.jsonl"
    write_documents(source)
    seconds, peak, printed = preprocess("dedup", source, "--out", folder / "unique")
    report = json.loads(printed)
    return [
        "",
        f"Dedup of {report['documents']:,} documents of {source.stat().st_size / NUM_DOCUMENTS:.0f} bytes: "
        f"{seconds / 60:.1f} minutes (10), "
        f"{peak:.2f} GB over all processes (6); {report['exact']:,} exact and {report['near']:,} near duplicates removed.",
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [*tokenize(folder), *load(folder), *deduplicate(folder)]
    write_report(RESULTS, f"Data ({len(os.sched_getaffinity(0))} workers)", "data.py", lines)
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
