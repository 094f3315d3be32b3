# SPDX-License-Identifier: Apache-2.0
"""Open the training data of a run: text is tokenized first, by one process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import made_once, write_atomically
from sporeloom.data.arrays import read_arrays
from sporeloom.data.blend import BlendEntry, short_datasets
from sporeloom.data.curriculum import Curriculum, check_index, read_curriculum
from sporeloom.data.loader import Dataset, Loader, rows_of_rank
from sporeloom.data.megatron import MegatronLoader
from sporeloom.data.packing import Arrangement, BestFit, ShuffledStream, Stream, save_packing
from sporeloom.data.passages import sample_passages
from sporeloom.data.sources import DocumentSource
from sporeloom.data.streaming import StreamLoader
from sporeloom.data.token_file import TokenFile
from sporeloom.data.tokenize import TokenizeJob, tokenize
from sporeloom.data.tokenizer import Tokenizer, content_hash, find_tokenizer, folder_tokenizer, load_tokenizer
from sporeloom.models.family import family_module
from sporeloom.train.config import Run


def open_loader(run: Run, rank: int) -> tuple[Tokenizer, Loader | MegatronLoader | StreamLoader]:
    """Open tokenizer and loader of a run of any kind of data.

    Raises:
        ConfigError: the tokenizer or the data do not fit the model.
    """
    if run.data.stream is not None:
        return _streamed(run, rank)
    if run.data.megatron is None:
        return prepare_data(run, rank)
    assert run.config.tokenizer
    tokenizer = load_tokenizer(run.family, run.config.tokenizer, run.model)
    sizes = run.model.eod_id, run.model.vocab_size
    return tokenizer, MegatronLoader(run.data.megatron, run.sizes, run.config.steps, *sizes, _rows(run, rank))


def _streamed(run: Run, rank: int) -> tuple[Tokenizer, StreamLoader]:
    """Open tokenizer and loader of text that is tokenized while the run trains."""
    config: Any = run.config
    tokenizer = load_tokenizer(run.family, config.tokenizer, run.model)
    ids = {"eod_id": run.model.eod_id, "loss_ignore_id": run.model.loss_ignore_id}
    content = content_hash(config.tokenizer)
    return tokenizer, StreamLoader(
        run.data.stream, tokenizer, content, run.sizes, config.seed, config.shuffle_block, _rows(run, rank), **ids
    )


def tokenizer_path(run: Run) -> Path:
    """Path of the tokenizer of the data, which exists once they are open."""
    config = run.config
    if config.tokenizer is not None:
        return config.tokenizer
    if run.data.parts is not None:
        return find_tokenizer(run.family, run.data.parts[0].tokens.folder)
    name = Path(family_module(run.family, "tokenizer").FILE_NAMES[0])
    content = hashlib.sha256("\x00".join(run.data.documents).encode()).hexdigest()
    return config.output_dir / "data" / f"{name.stem}-{content[:16]}-{run.model.vocab_size}{name.suffix}"


def prepare_data(run: Run, rank: int) -> tuple[Tokenizer, Loader]:
    """Open tokenizer and loader; files that have to be made are made once, under names that identify their
    contents.

    Raises:
        ConfigError: the tokenizer or the token files do not fit the model.
    """
    if run.data.parts is None:
        tokenizer, part = _tokenized(run, rank)
        parts = [part]
        if problems := short_datasets(parts, run.seq_len):
            raise ConfigError([*problems, "give more text, or a smaller --seq-len"])
    else:
        parts = run.data.parts
        tokenizer = folder_tokenizer(run.family, parts[0].tokens.folder, run.model, run.config.tokenizer)
    datasets = [
        Dataset(
            part.name,
            part.tokens,
            part.weight,
            _ignored(run, rank, part.tokens),
            _arrangement(run, rank, part),
            run.model.domain_offset(part.domain),
        )
        for part in parts
    ]
    ids = run.model.eod_id, run.model.loss_ignore_id
    curriculum = _curriculum(run, parts)
    return tokenizer, Loader(datasets, run.sizes, run.config.seed, *ids, _rows(run, rank), curriculum)


def _rows(run: Run, rank: int) -> Callable[[int], NDArray[np.int64]]:
    """Rows of a batch that the graph of a rank takes."""
    mesh, microbatches = run.strategy.mesh, run.strategy.num_microbatches(run.config.accumulate)
    return rows_of_rank(mesh.dp, mesh.coordinate(rank, "dp"), microbatches)


def _tokenized(run: Run, rank: int) -> tuple[Tokenizer, BlendEntry]:
    """Make the tokenizer and the token files of the run's text."""
    config, module = run.config, family_module(run.family, "tokenizer")
    assert run.data.documents is not None
    folder, first, documents = config.output_dir / "data", rank == 0, run.data.documents
    content = hashlib.sha256("\x00".join(documents).encode())
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    path = tokenizer_path(run)
    if config.tokenizer is None:

        def train_tokenizer(partial: Path) -> None:
            partial.write_bytes(module.train_tokenizer(sample_passages(documents).texts, run.model.vocab_size))

        made_once(path, first, lambda path: write_atomically(path, train_tokenizer))
    tokenizer = load_tokenizer(run.family, path, run.model)
    content.update(content_hash(path).encode())
    job = TokenizeJob(DocumentSource((config.data,)), run.family, path)
    tokens = folder / f"tokens-{content.hexdigest()[:16]}"
    made_once(tokens, first, lambda out: tokenize(job, out, workers=0, show_progress=False))
    return tokenizer, BlendEntry(str(config.data), TokenFile(tokens), 1.0)


def _curriculum(run: Run, parts: list[BlendEntry]) -> Curriculum | None:
    path, packing = run.config.curriculum, run.config.packing  # type: ignore[attr-defined]
    if path is None:
        return None
    config = read_curriculum(path)
    index = check_index(path, path.parent / config.index, run.seq_len, packing, parts[0].tokens.info.content)
    curriculum = Curriculum(config, index, run.config.seed)
    if problems := [f"{path}: {problem}" for problem in curriculum.problems()]:
        raise ConfigError(problems)
    return curriculum


def _arrangement(run: Run, rank: int, part: BlendEntry) -> Arrangement:
    """Turn the documents of a dataset into samples. A packing is computed by one process and stored."""
    packing, seq_len, info = run.config.packing, run.seq_len, part.tokens.info  # type: ignore[attr-defined]
    if packing == "stream":
        return Stream(part.tokens, seq_len)
    if info.record_length:
        raise ConfigError(f"{part.name}: contains fixed-length records; give --packing stream")
    if packing == "shuffled":
        key = hashlib.sha256(f"{run.config.seed} documents {info.content}".encode()).digest()
        return ShuffledStream(part.tokens, seq_len, int.from_bytes(key[:8], "big"))
    path = run.config.output_dir / "data" / f"packing-{info.content[:16]}-{seq_len}.npz"
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
    made_once(path, rank == 0, lambda path: save_packing(part.tokens, seq_len, path))
    return BestFit(part.tokens, seq_len, path)


def _ignored(run: Run, rank: int, tokens: TokenFile) -> NDArray[np.int64]:
    """Positions of the token that is not trained on. Finding them takes a pass over the tokens, so one process
    does it."""
    token = run.model.loss_ignore_id
    if token == tokens.info.eod_id:
        return tokens.places_of(token)
    path = run.config.output_dir / "data" / f"places-{tokens.info.content[:16]}-{token}.npz"

    def save(partial: Path) -> None:
        with partial.open("wb") as file:
            np.savez(file, places=tokens.places_of(token))

    made_once(path, rank == 0, lambda path: write_atomically(path, save))
    (places,) = read_arrays(path, "places")
    return places
