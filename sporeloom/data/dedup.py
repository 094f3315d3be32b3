# SPDX-License-Identifier: Apache-2.0
"""Keep one document of every group of duplicates, exact or near, within and across datasets.

As MT-NLG did (Smith et al. 2022, section 3.1): MinHash and banding find candidates, their Jaccard similarity is computed,
connected ones are a group, and the one from the best dataset stays. Memory grows by about 200 bytes a document, whatever
its length: texts and band keys lie in a temporary folder.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from sporeloom.core.errors import ConfigError
from sporeloom.core.locks import one_writer
from sporeloom.core.log import milestone
from sporeloom.data.cluster import Workers, over, over_batches
from sporeloom.data.minhash import MinHash, jaccard, shingle_set, text_hash
from sporeloom.data.rewrite import check_outputs, complete_or_absent, to_line
from sporeloom.data.sources import LINES, Batch, DocumentSource

SMALL_BUCKET = 16
PAIRS_A_TASK = 2000
NOBODY = -1
Ints = NDArray[np.int64]
TEXTS, KEYS = "texts", "keys"


@dataclass
class SignatureBatch:
    """A batch of documents, with the keys and signatures to compare them."""

    texts: list[bytes]
    hashes: bytes
    keys: NDArray[np.uint64]
    problems: list[str]
    skipped: Counter[str]


@dataclass
class Corpus:
    """All documents of all datasets, in the order of their quality; texts on disk."""

    folder: Path
    ends: array = field(default_factory=lambda: array("q"))  # type: ignore[type-arg]
    hashes: bytearray = field(default_factory=bytearray)
    counts: list[Counter[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ends)


def dedup(source: DocumentSource, out: Path, minhash: MinHash, workers: Workers) -> dict[str, Any]:
    """Write the remaining documents, one file for each input, into folder `out`. Returns the report.

    `source.inputs`: the datasets, the best first.

    Raises:
        ConfigError: bad input; files that are there already; a full disk.
    """
    outputs = [out / (_stem(path) + ".jsonl") for path in source.inputs]
    pairs_file = out / "duplicates.jsonl"
    written = [str(path) for path in (*outputs, pairs_file)]
    if twice := sorted({path for path in written if written.count(path) > 1}):
        raise ConfigError(f"two inputs would be written to one file: {', '.join(twice)}; rename one")
    check_outputs(*outputs, pairs_file)
    source.files()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with one_writer(out), tempfile.TemporaryDirectory(prefix=".dedup-", dir=out) as folder:
            corpus = _sign(source, Path(folder), minhash, workers)
            groups = _group(corpus, minhash, workers)
            removed = _write(source, outputs, pairs_file, corpus, groups)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror or error}") from None
    return {
        "documents": len(corpus),
        "kept": len(corpus) - sum(removed.values()),
        **removed,
        "datasets": {str(path): dict(counts) for path, counts in zip(source.inputs, corpus.counts, strict=True)},
        "first_problems": corpus.problems[:20],
    }


def _stem(path: Path) -> str:
    suffix = next((s for s in LINES if path.name.endswith(s)), "" if path.is_dir() else path.suffix)
    return path.name.removesuffix(suffix)


def _make_signer(source: DocumentSource, minhash: MinHash) -> Callable[[Batch], SignatureBatch]:
    def sign(batch: Batch) -> SignatureBatch:
        parsed = source.parse(batch)
        texts = [document.text for _, document in parsed.documents]
        keys = minhash.band_keys(texts) if texts else np.empty((0, minhash.bands), np.uint64)
        hashes = b"".join(map(text_hash, texts))
        return SignatureBatch([t.encode() for t in texts], hashes, keys, parsed.remarks, parsed.skipped)

    return sign


def _sign(source: DocumentSource, folder: Path, minhash: MinHash, workers: Workers) -> Corpus:
    """Read every document once."""
    corpus, end = Corpus(folder), 0
    with ExitStack() as files:
        texts = files.enter_context((folder / TEXTS).open("wb"))
        bands = [files.enter_context((folder / f"{KEYS}{band}").open("wb")) for band in range(minhash.bands)]
        bar = files.enter_context(tqdm(unit=" documents", unit_scale=True, disable=None))
        for path in source.inputs:
            alone, counts = replace(source, inputs=(path,)), Counter[str]()
            results = over_batches(workers, SignatureBatch, partial(_make_signer, alone, minhash), alone)
            files.callback(results.close)  # type: ignore[attr-defined]
            for signed in results:
                for text in signed.texts:
                    texts.write(text)
                    end += len(text)
                    corpus.ends.append(end)
                for band, keys in zip(bands, signed.keys.T, strict=True):
                    band.write(keys.tobytes())
                corpus.hashes += signed.hashes
                corpus.problems += signed.problems[: max(0, 20 - len(corpus.problems))]
                counts += Counter(documents=len(signed.texts)) + signed.skipped
                bar.update(len(signed.texts))
            corpus.counts.append(counts)
    if not len(corpus):
        raise ConfigError([f"{', '.join(map(str, source.inputs))}: contains no text", *corpus.problems[:5]])
    return corpus


@dataclass(frozen=True)
class Duplicates:
    """Result of the comparisons for each document."""

    instead: Ints
    """The document that is kept instead of it; NOBODY: it is kept itself."""
    is_copy: NDArray[np.bool_]
    """Whether an earlier document has the same text."""
    similarity: NDArray[np.float32]
    """Similarity to the most similar document it was compared with; 1 for a copy."""


def _group(corpus: Corpus, minhash: MinHash, workers: Workers) -> Duplicates:
    first = _exact(corpus)
    is_copy = first != np.arange(len(corpus))
    similarity = is_copy.astype(np.float32)
    group = _Groups(first)
    pairs = _candidates(corpus, minhash, first)
    milestone(f"{int(is_copy.sum()):,} exact duplicates; comparing {len(pairs):,} candidate pairs")
    tasks = (pairs[i : i + PAIRS_A_TASK] for i in range(0, len(pairs), PAIRS_A_TASK))
    ends = np.frombuffer(corpus.ends, np.int64)
    located = ((np.stack([ends[task] - _lengths(ends, task), ends[task]], -1), task) for task in tasks)
    make_comparer = partial(_make_comparer, corpus.folder / TEXTS, minhash.shingle)
    for task, found in tqdm(over(workers, make_comparer, located), unit=" tasks", disable=None):
        for (a, b), value in zip(task, found, strict=True):
            if value >= minhash.threshold:
                group.join(int(a), int(b))
                similarity[b] = max(similarity[b], value)
                similarity[a] = max(similarity[a], value)
    roots = group.roots()
    return Duplicates(np.where(roots == np.arange(len(roots)), NOBODY, roots), is_copy, similarity)


def _lengths(ends: Ints, numbers: Ints) -> Ints:
    before = np.where(numbers > 0, ends[np.maximum(numbers - 1, 0)], 0)
    return ends[numbers] - before


def _exact(corpus: Corpus) -> Ints:
    """For each document the first with the same text."""
    halves = np.frombuffer(bytes(corpus.hashes), np.uint64).reshape(-1, 2)
    order = np.lexsort((np.arange(len(halves)), halves[:, 0], halves[:, 1]))
    new = np.ones(len(order), bool)
    new[1:] = (halves[order[1:]] != halves[order[:-1]]).any(axis=1)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    return first


def _candidates(corpus: Corpus, minhash: MinHash, first: Ints) -> Ints:
    """Pairs (n, 2) of different documents with a common band key.

    In a bucket of many, each is paired with the SMALL_BUCKET before it only; copies further apart are connected by those
    between, or meet in another band.
    """
    unique = np.flatnonzero(first == np.arange(len(first)))
    found = np.empty(0, np.int64)
    for band in range(minhash.bands):
        keys = np.fromfile(corpus.folder / f"{KEYS}{band}", np.uint64)[unique]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        pairs = [found]
        for distance in range(1, SMALL_BUCKET + 1):
            same = np.flatnonzero(keys[distance:] == keys[:-distance])
            if not len(same):
                break
            a, b = unique[order[same]], unique[order[same + distance]]
            pairs.append(np.minimum(a, b) * len(first) + np.maximum(a, b))
        found = np.unique(np.concatenate(pairs))
    return np.stack(np.divmod(found, len(first)), axis=-1)


def _make_comparer(texts: Path, shingle: int) -> Callable[[tuple[Ints, Ints]], tuple[Ints, list[float]]]:
    stored = np.memmap(texts, np.uint8, "r")

    def compare(task: tuple[Ints, Ints]) -> tuple[Ints, list[float]]:
        places, pairs = task
        sets = {
            int(number): shingle_set(stored[start:end].tobytes().decode(), shingle)
            for (start, end), number in zip(places.reshape(-1, 2), pairs.reshape(-1), strict=True)
        }
        return pairs, [jaccard(sets[int(a)], sets[int(b)]) for a, b in pairs]

    return compare


class _Groups:
    """Union-find; the smallest number, that of the best dataset, represents its group."""

    def __init__(self, parents: Ints):
        self._parents = parents.tolist()

    def root(self, number: int) -> int:
        parents = self._parents
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    def join(self, a: int, b: int) -> None:
        a, b = sorted((self.root(a), self.root(b)))
        self._parents[b] = a

    def roots(self) -> Ints:
        return np.array([self.root(number) for number in range(len(self._parents))], np.int64)


def _write(
    source: DocumentSource, outputs: list[Path], pairs_file: Path, corpus: Corpus, duplicates: Duplicates
) -> Counter[str]:
    """Write all outputs, or none. Returns how many documents were removed and why."""
    removed, documents = Counter[str](exact=0, near=0), iter(range(len(corpus)))
    places, instead = dict[int, str](), duplicates.instead
    wanted = {int(n) for n in np.unique(instead) if n != NOBODY}
    with ExitStack() as files:
        note = files.enter_context(complete_or_absent(pairs_file))
        for path, output, counts in zip(source.inputs, outputs, corpus.counts, strict=True):
            write = files.enter_context(complete_or_absent(output))
            for place, line in _documents_again(replace(source, inputs=(path,)), counts["documents"]):
                document = next(documents)
                if document in wanted:
                    places[document] = place
                if instead[document] == NOBODY:
                    write(line)
                    counts["kept"] += 1
                    continue
                kind = "exact" if duplicates.is_copy[document] else "near"
                removed[kind] += 1
                counts[kind] += 1
                similarity = round(float(duplicates.similarity[document]), 4)
                note(to_line({"removed": place, "kept": places[int(instead[document])], "similarity": similarity}))
    return removed


def _documents_again(source: DocumentSource, expected: int) -> Iterator[tuple[str, bytes]]:
    """Position and JSON line of each document, as it was read before."""
    count = 0
    for batch in source.batches(all_fields=True):
        for _, document in replace(source, on_error="skip").parse(batch).documents:
            count += 1
            yield document.place, to_line({**document.record, source.key: document.text})
    if count != expected:
        raise ConfigError(f"{source.inputs[0]}: changed while it was read")
