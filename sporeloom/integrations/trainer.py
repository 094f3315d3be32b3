# SPDX-License-Identifier: Apache-2.0
"""MindFormers' Trainer for its YAML files: each call runs one of this package's commands. Needs no mindformers.

Trainer("run_pangualpha_13b.yaml", train_dataset="tokens/").train()
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.log import milestone
from sporeloom.core.shipped import DECODER
from sporeloom.data.blend import BlendEntry, read_blend, short_datasets
from sporeloom.dialects import Settings
from sporeloom.dialects.settings import LOSSES
from sporeloom.dialects.translate import read, recognize
from sporeloom.inference.config import GenerateConfig
from sporeloom.inference.config import check as check_generation
from sporeloom.runtime.environment import is_first_process, launched_processes, prepare_environment
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.text import strategy_text
from sporeloom.train.checks import check as check_training
from sporeloom.train.plain_text import TrainConfig

LOGITS_BYTES = 1 << 28


class Trainer:
    """A run as a MindFormers YAML file describes it.

    Args:
        args: MindFormers 1.x or 2.x file. What of it is lost here is said once, with file and line.
        train_dataset: token files, a blend or text; MindFormers' own datasets are not read.
        model: a checkpoint folder to start from, or to evaluate and predict with.
        devices: of the job, where the file does not say its data parallel degree.
        options: fields of tools/train.py's configuration, which come before the file's.

    Raises:
        ConfigError: the file cannot be understood, or an option is unknown.
    """

    def __init__(
        self,
        args: str | Path,
        train_dataset: str | Path | None = None,
        eval_dataset: str | Path | None = None,
        model: str | Path | None = None,
        devices: int | None = None,
        **options: Any,
    ):
        path = Path(args)
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        if wrong := [name for name in options if name not in known]:
            raise ConfigError(f"Trainer: {wrong[0]} is not a field of tools/train.py's configuration")
        self.settings, self.notes = read(path, recognize(path), Settings(SINGLE_DEVICE), devices)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.model = Path(model) if model else None
        given = {name: value for name, value in self.settings.train.items() if name in known}
        paths = {name for name, hint in get_type_hints(TrainConfig).items() if "Path" in str(hint)}
        self.options: dict[str, Any] = {
            name: Path(value) if name in paths and value is not None else value
            for name, value in {"output_dir": "output", **given, **options}.items()
        }
        if is_first_process():
            for note in self.notes:
                if note.fate in LOSSES:
                    milestone(str(note))

    def train(self) -> Path | None:
        """Train. Returns the folder of the trained model; None if the run was stopped."""
        return self._train(None)

    def finetune(self, finetune_checkpoint: str | Path | None = None) -> Path | None:
        """Continue training from a checkpoint folder."""
        folder = finetune_checkpoint or self.model
        if folder is None:
            raise ConfigError("finetune needs a checkpoint folder to start from")
        return self._train(Path(folder))

    def evaluate(self, eval_checkpoint: str | Path | None = None) -> dict[str, float]:
        """Mean loss of a checkpoint on all sequences of `eval_dataset`, token files; on one device."""
        folder = self._checkpoint(eval_checkpoint)
        family, model = load_config(folder)
        if self.eval_dataset is None:
            raise ConfigError("evaluate needs eval_dataset: a folder of token files")
        (part, *others) = read_blend(Path(self.eval_dataset))
        if others:
            raise ConfigError(f"{self.eval_dataset}: one folder of token files is expected, not a blend")
        samples = _samples(part, self.options.get("seq_len") or model.seq_len, model.vocab_size)
        prepare_environment()
        engine = import_module("sporeloom.runtime.engine").Engine.start(SINGLE_DEVICE)
        scorer = import_module("sporeloom.inference.score").Scorer(engine, folder, family, model)
        loss, num_tokens = scorer.mean_loss(samples)
        return {"loss": loss, "num_tokens": num_tokens}

    def predict(
        self, input_data: str | Sequence[str], predict_checkpoint: str | Path | None = None, **options: Any
    ) -> list[str]:
        """Continue each text with a checkpoint; `options` as in tools/generate.py."""
        texts = [input_data] if isinstance(input_data, str) else list(input_data)
        named = [(f"input_data[{i}]", text) for i, text in enumerate(texts)]
        known = [field.name for field in dataclasses.fields(GenerateConfig)]
        if wrong := [name for name in options if name not in known]:
            raise ConfigError(f"predict: {wrong[0]} is unknown; known: {', '.join(known)}")
        job = check_generation(
            GenerateConfig(checkpoint=self._checkpoint(predict_checkpoint), **options), launched_processes(), named
        )
        prepare_environment()
        open_session = import_module("sporeloom.inference.terminal").open_session
        engine = import_module("sporeloom.runtime.engine").Engine.start(job.strategy)
        completions = open_session(job, engine).complete(job.prompts, job.config, job.config.max_new_tokens)
        return [completion.text for completion in completions]

    def _checkpoint(self, folder: str | Path | None) -> Path:
        trained = Path(self.options["output_dir"]) / "checkpoint"
        return Path(folder) if folder else self.model or trained

    def _train(self, start: Path | None) -> Path | None:
        if self.train_dataset is None:
            raise ConfigError(
                "train needs train_dataset: token files, a blend, or text (tools/preprocess.py makes token files)"
            )
        if "steps" not in self.options:
            raise ConfigError("a run has a number of steps: set runner_config.stop_step, or give steps=...")
        files = {"strategy": self._strategy_file(), "config": self._model_file(start)}
        config = TrainConfig(data=Path(self.train_dataset), **{**files, **self.options, "from_checkpoint": start})
        run = check_training(config, launched_processes())
        prepare_environment()
        train = import_module("sporeloom.train.trainer").train
        trained: Path | None = train(run)
        return trained

    def _model_file(self, start: Path | None) -> Path | None:
        """The model of the file, where it is not a built-in size, and neither an option nor a checkpoint gives it.

        Raises:
            ConfigError: nothing gives it.
        """
        if start or {"size", "config"} & self.options.keys():
            return None
        if self.settings.model is None:
            source = self.settings.strategy.source
            raise ConfigError(
                f"{source} names no model of a size known here: give size=... or config=..., or model=..."
            )
        path = Path(self.options["output_dir"]) / "model.json"
        write_text_atomically(path, json.dumps(self.settings.model.to_dict(), indent=2) + "\n")
        return path

    def _strategy_file(self) -> Path | None:
        """The translated strategy, next to the run's other files."""
        if self.settings.strategy.mesh.size == 1:
            return None
        path = Path(self.options["output_dir"]) / "strategy.yaml"
        write_text_atomically(path, strategy_text(self.settings.strategy, DECODER))
        return path


def _samples(part: BlendEntry, seq_len: int, vocab_size: int) -> Iterator[np.ndarray[Any, Any]]:
    """All sequences, in batches whose logits fit into LOGITS_BYTES."""
    tokens, rows = part.tokens, max(1, LOGITS_BYTES // (4 * seq_len * vocab_size))
    if problems := short_datasets([part], seq_len):
        raise ConfigError(problems)
    starts = [tokens.start(i, seq_len) for i in range(tokens.num_samples(seq_len))]
    for first in range(0, len(starts), rows):
        chosen = starts[first : first + rows]
        yield np.stack([tokens.tokens[start : start + seq_len + 1] for start in chosen]).astype(np.int32)
