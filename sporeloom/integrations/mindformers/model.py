# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder as a model of MindFormers, with the networks, caches and sampling of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.inference.decoding import Decoding
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import load_model
from sporeloom.inference.requests import Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import generate
from sporeloom.inference.score import Scorer
from sporeloom.integrations.mindformers.config import CodeGeeXConfig, FamilyConfig, PaLMConfig, PanGuConfig
from sporeloom.integrations.mindformers.library import mindformers
from sporeloom.models.config import ModelConfig
from sporeloom.models.slots import num_slots_for
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy

SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_new_tokens",
    "seed": "seed",
}
"""MindFormers' names for fields of `SamplingConfig`."""
GENERATE = (
    "max_new_tokens",
    "max_length",
    "do_sample",
    "eos_token_id",
    "return_dict_in_generate",
    "pad_token_id",
    "use_past",
)


class FamilyModel(mindformers.PreTrainedModel):
    """A checkpoint folder, on one device or under a strategy in each process of a job."""

    def __init__(self, config: FamilyConfig, folder: str | Path | None = None, strategy: str | Path | None = None):
        super().__init__(config)
        if folder is None:
            raise ConfigError(
                f"{type(self).__name__} has its weights from a checkpoint folder: use from_pretrained(FOLDER)"
            )
        self._folder = Path(folder)
        self._plan = load_strategy(strategy, for_inference=True) if strategy else SINGLE_DEVICE
        self._engine = Engine.start(self._plan)
        self._whole: Any = None
        self._cached: dict[int, Decoding] = {}

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *unused: Any, strategy: str | Path | None = None, **others: Any
    ) -> FamilyModel:
        """Open the model of a checkpoint folder.

        Raises:
            ConfigError: there is none, of another family, or arguments that mean nothing here.
        """
        ours = {"config", "pretrained_model_name_or_path", "trust_remote_code"}
        wrong = [name for name, given in others.items() if given is not None and name not in ours and name[0] != "_"]
        if unused or wrong:
            raise ConfigError(
                f"from_pretrained takes a folder and a strategy, not {', '.join([*map(str, unused), *wrong])}"
            )
        family, model = load_config(Path(folder))
        if family != cls.config_class.family:
            raise ConfigError(f"{folder}: a checkpoint of {family}, not of {cls.config_class.family}")
        return cls(cls.config_class(name_or_path=str(folder), **model.to_dict()), folder, strategy)

    from_pretrained_experimental_mode = from_pretrained  # called by AutoModel for a folder without YAML

    def __call__(self, input_ids: Any, eod_id: int | None = None) -> Tensor | None:
        """Logits (B, T, V) of token ids (B, T), as tools/score.py computes them; None on ranks that do not hold them."""
        config = self.config.decoder_config()
        if self._whole is None:
            self._whole = Scorer(self._engine, self._folder, self.config.family, config)
        ids = _array(input_ids)
        if ids.shape[1] > config.seq_len or ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ConfigError(
                f"input_ids {ids.shape}: up to {config.seq_len} ids from 0 to {config.vocab_size - 1} a row"
            )
        logits = self._whole.logits(ids, eod_id)
        return None if logits is None else Tensor(logits)

    def generate(self, input_ids: Any, generation_config: Any = None, **options: Any) -> Any:
        """Token ids of each row, the prompt first, with the cache; greedy without do_sample=True.

        Raises:
            ConfigError: options that are unknown or out of range, prompts that leave no room.
        """
        if generation_config is not None:
            raise ConfigError("generate takes its options by name, not as a generation_config")
        known = (*SAMPLING, *GENERATE)
        if wrong := [name for name, value in options.items() if name not in known and value is not None]:
            raise ConfigError(
                f"generate: {wrong[0]} is unknown{did_you_mean(wrong[0], known)}; known: {', '.join(known)}"
            )
        config = self.config.decoder_config()
        prompts = [[int(i) for i in row] for row in _rows(input_ids)]
        requests = self._requests(prompts, options, config)
        decoding = self._decoding(len(prompts), config)
        decoding.prepare([len(prompt) for prompt in prompts], max(request.max_new_tokens for request in requests))
        for new in generate(decoding, self._engine, requests):
            prompts[new.request].append(new.token)
        return {"sequences": prompts} if options.get("return_dict_in_generate") else prompts

    def _requests(self, prompts: list[list[int]], options: dict[str, Any], config: ModelConfig) -> list[Request]:
        sampling = {SAMPLING[name]: value for name, value in options.items() if name in SAMPLING and value is not None}
        if not options.get("do_sample", False):
            sampling["temperature"] = 0.0
        elif "temperature" not in sampling:
            sampling["temperature"] = 1.0
        chosen = SamplingConfig(**sampling)
        problems = list(chosen.problems(config.vocab_size))
        given = options.get("eos_token_id")
        stops = [
            *config.end_ids,
            *(given if isinstance(given, (list, tuple)) else [given] if given is not None else []),
        ]
        if not problems and chosen.leaves_none(stops, config.vocab_size):
            problems.append("generate: eos_token_id and min_new_tokens leave no token to choose")
        sampler, requests = Sampler(chosen, sorted(set(stops)), config.vocab_size), []
        for number, prompt in enumerate(prompts):
            most = options.get("max_new_tokens") or (options.get("max_length") or config.seq_len) - len(prompt)
            if not prompt or most < 1 or len(prompt) + most > config.seq_len:
                problems.append(f"row {number}: {len(prompt)} ids and {most} new ones do not fit 1 .. {config.seq_len}")
            requests.append(Request(list(prompt), most, sampler, lambda tokens: tokens[-1] in stops, number))
        if problems:
            raise ConfigError(problems)
        return requests

    def _decoding(self, rows: int, config: ModelConfig) -> Decoding:
        rows = -(-rows // self._plan.mesh.dp) * self._plan.mesh.dp
        if rows not in self._cached:
            shape = (rows, num_slots_for(config.seq_len))
            net = load_model(self._folder, self.config.family, config, self._plan, shape)
            self._cached[rows] = cached(self._engine, net, config, *shape)
        return self._cached[rows]


class PanGuForCausalLM(FamilyModel):
    config_class = PanGuConfig


class CodeGeeXForCausalLM(FamilyModel):
    config_class = CodeGeeXConfig


class PaLMForCausalLM(FamilyModel):
    config_class = PaLMConfig


def _array(ids: Any) -> NDArray[np.int64]:
    array = np.asarray(ids.asnumpy() if isinstance(ids, Tensor) else ids, np.int64)
    return array[None] if array.ndim == 1 else array


def _rows(ids: Any) -> list[Any]:
    """Rows of ids, of any lengths."""
    if isinstance(ids, (Tensor, np.ndarray)):
        return list(_array(ids))
    return [ids] if not ids or not isinstance(ids[0], (list, tuple, np.ndarray)) else list(ids)
