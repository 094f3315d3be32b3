# SPDX-License-Identifier: Apache-2.0
"""What windows cut, and what best-fit packing leaves free.

Needs ../shared/data (Chinese text). Writes benchmarks/results/packing.md.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
from report import ROOT, write_report

from sporeloom.data.documents import read_documents
from sporeloom.data.packing import BestFit, save_packing
from sporeloom.data.sources import DocumentSource
from sporeloom.data.token_file import TokenFile
from sporeloom.data.tokenize import TokenizeJob, tokenize
from sporeloom.models.family import family_module

RESULT = Path(__file__).resolve().parent / "results" / "packing.md"


def num_cut_by_windows(ends: np.ndarray, seq_len: int) -> int:
    """Number of documents that windows of the stream split, of those that would fit into one."""
    begins = ends - np.diff(ends, prepend=0)
    fits = ends - begins <= seq_len + 1
    return int((fits & (begins // seq_len != (ends - 2) // seq_len) & (ends - begins > 1)).sum())


def main():
    folder, lines = Path(tempfile.mkdtemp(prefix="packing-")), []
    for path in (ROOT.parent / "shared" / "data" / "zh_poetry.jsonl",):
        model = folder / f"{path.stem}.model"
        texts = read_documents(path)
        model.write_bytes(family_module("pangu", "tokenizer").train_tokenizer(texts[:5000], 8000))
        tokenize(TokenizeJob(DocumentSource((path,)), "pangu", model), folder / path.stem, 2, show_progress=False)
        tokens = TokenFile(folder / path.stem)
        mean = tokens.info.num_tokens / tokens.info.num_documents
        lines += [
            f"{path.name}: {tokens.info.num_documents:,} documents, {mean:.0f} tokens on average.",
            "",
            "| sequence | of the documents that fit, cut by windows | longer ones | padding of best fit | packing took |",
            "|---|---|---|---|---|",
        ]
        for seq_len in (128, 256, 512, 1024, 2048):
            begun, out = time.perf_counter(), folder / f"{path.stem}-{seq_len}.npz"
            save_packing(tokens, seq_len, out)
            seconds = time.perf_counter() - begun
            ends = np.asarray(tokens.ends)
            longer = int((np.diff(ends, prepend=0) > seq_len + 1).sum())
            packed = BestFit(tokens, seq_len, out)
            padding = 1 - (packed.num_trained + 1) / (seq_len + 1)
            cut = num_cut_by_windows(ends, seq_len) / (len(ends) - longer)
            lines.append(f"| {seq_len} | {cut:.1%} | {longer:,} | {padding:.3%} | {seconds:.2f} s |")
        lines.append("")
    write_report(RESULT, "Packing", "packing.py", lines[:-1])


if __name__ == "__main__":
    main()
