# SPDX-License-Identifier: Apache-2.0
"""PanGu, CodeGeeX and PaLM behind MindFormers' interfaces: importing this registers them with its Auto classes.

    import mindloom.integrations.mindformers
    from mindformers import AutoConfig, AutoModel, AutoTokenizer, pipeline
    from mindloom.integrations.trainer import Trainer           # for its YAML files

    model = AutoModel.from_pretrained("out/checkpoint")
    tokenizer = AutoTokenizer.from_pretrained("out/checkpoint")
    pipeline("text_generation", model=model, tokenizer=tokenizer)("...", max_new_tokens=32)

Adapters only: networks, caches, sampling and tokenizers are ours. Needs the extra `mindformers` (1.9).
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from mindloom.checkpoint.model_folder import load_config
from mindloom.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from mindloom.errors import ConfigError, did_you_mean
from mindloom.inference.decoding import Decoding
from mindloom.inference.mixed import cached
from mindloom.inference.model import load_model
from mindloom.inference.sampling import Sampler, SamplingConfig
from mindloom.inference.scheduler import Request, generate
from mindloom.inference.score import Scorer
from mindloom.models.config import ModelConfig
from mindloom.models.family import size_config
from mindloom.models.slots import num_slots_for
from mindloom.reader import Document, fields_from
from mindloom.runtime.engine import Engine
from mindloom.runtime.environment import prepare_environment
from mindloom.strategy.config import SINGLE_DEVICE
from mindloom.strategy.loader import load_strategy


@contextmanager
def _quietly() -> Iterator[None]:
    """Importing mindformers warns of parts that are for Ascend, and takes over how Python shows warnings."""
    show = warnings.showwarning
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        warnings.showwarning = show


prepare_environment()
with _quietly():
    try:
        _mindformers: Any = import_module("mindformers")
        _tokenization: Any = import_module("mindformers.models.tokenization_utils")
        _logger: logging.Logger = import_module("mindformers.tools.logger").get_logger()
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'mindloom[mindformers]'") from None

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_new_tokens",
    "seed": "seed",
}
"""MindFormers' words for what `SamplingConfig` has."""
NOISE = (
    "openMind Hub",
    "config swap_config is empty",
    "config monitor_config is empty",
    "Some configs in yaml are useless",
    *("loading configuration file", "Model config ", "model config: ", "Could not locate the tokenizer configuration"),
    *("loading file ", "Initializing ms pipeline", "mindspore mode not set"),
)
"""What MindFormers says of files nobody asked for, and the whole configuration whenever one is read."""
GENERATE = (
    "max_new_tokens",
    "max_length",
    "do_sample",
    "eos_token_id",
    "return_dict_in_generate",
    "pad_token_id",
    "use_past",
)


class _Config(_mindformers.PretrainedConfig):
    """A ModelConfig as MindFormers sees one; its fields are attributes."""

    family = ""

    def __init__(self, **values: Any):
        values.pop("family", None)
        mine = {name: values.pop(name) for name in FIELDS if name in values}
        config = fields_from(ModelConfig, Document("config.json", mine), size_config(self.family, "tiny"))
        for name in FIELDS:
            setattr(self, name, getattr(config, name))
        self.seq_length = config.seq_len
        super().__init__(**{"eos_token_id": config.eod_id, **values})

    def decoder_config(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in FIELDS})


class PanGuConfig(_Config):
    model_type, family = "pangu", "pangu"


class CodeGeeXConfig(_Config):
    model_type, family = "codegeex", "codegeex"


class PaLMConfig(_Config):
    model_type, family = "palm", "palm"


class _Model(_mindformers.PreTrainedModel):
    """A checkpoint folder of ours, on one device or under a strategy in each process of a job."""

    def __init__(self, config: _Config, folder: str | Path | None = None, strategy: str | Path | None = None):
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
    ) -> _Model:
        """The model of a checkpoint folder.

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

    from_pretrained_experimental_mode = from_pretrained  # what AutoModel calls for a folder without YAML

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
        stops = [config.eod_id, *(given if isinstance(given, (list, tuple)) else [given] if given is not None else [])]
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


class PanGuForCausalLM(_Model):
    config_class = PanGuConfig


class CodeGeeXForCausalLM(_Model):
    config_class = CodeGeeXConfig


class PaLMForCausalLM(_Model):
    config_class = PaLMConfig


class _Tokenizer(_tokenization.PreTrainedTokenizer):
    """A tokenizer of ours; text to ids and back is all its own."""

    family = ""

    def __init__(self, path: Path, own: Tokenizer):
        self._own, self._path = own, path
        super().__init__(eos_token=str(own.eod_id), pad_token=str(own.eod_id))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *unused: Any, **others: Any) -> _Tokenizer:
        """The tokenizer in a checkpoint folder."""
        family, model = load_config(Path(folder))
        path = find_tokenizer(family, Path(folder))
        return cls(path, load_tokenizer(family, path, model))

    @property
    def vocab_size(self) -> int:
        return self._own.vocab_size

    @property
    def eos_token_id(self) -> int:
        return self._own.eod_id

    @property
    def pad_token_id(self) -> int:
        return self._own.eod_id

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        """Ids as texts: pieces have no names that all families share."""
        return [str(i) for i in self._own.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token)

    def _convert_id_to_token(self, index: int) -> str:
        return str(index)

    def encode(self, text: str, **unused: Any) -> list[int]:
        return self._own.encode(text)

    def __call__(self, text: Any, padding: bool = False, return_tensors: str | None = None, **unused: Any) -> Any:
        """`input_ids` and `attention_mask` of a text or of several, filled up on the right where `padding` is set."""
        one = isinstance(text, str)
        rows = [self._own.encode(t) for t in ([text] if one else text)]
        longest = max(map(len, rows), default=0) if padding else 0
        masks = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        rows = [row + [self._own.eod_id] * (longest - len(row)) for row in rows]
        if return_tensors:
            if return_tensors not in ("np", "ms"):
                raise ConfigError(f"return_tensors is np or ms, got {return_tensors}")
            if len({len(row) for row in rows}) > 1:
                raise ConfigError("texts of several lengths make no array; set padding=True")
            arrays = {"input_ids": np.array(rows, np.int32), "attention_mask": np.array(masks, np.int32)}
            return arrays if return_tensors == "np" else {name: Tensor(array) for name, array in arrays.items()}
        return (
            {"input_ids": rows[0], "attention_mask": masks[0]} if one else {"input_ids": rows, "attention_mask": masks}
        )

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **unused: Any) -> Any:
        """The text of ids; of rows of ids the texts, as MindFormers' pipeline wants it."""
        rows = list(token_ids.asnumpy() if isinstance(token_ids, Tensor) else token_ids)
        if rows and isinstance(rows[0], (list, tuple, np.ndarray)):
            return self.batch_decode(rows, skip_special_tokens)
        return self._own.decode([int(i) for i in rows if not (skip_special_tokens and i == self._own.eod_id)])

    def batch_decode(self, sequences: Sequence[Any], skip_special_tokens: bool = False, **unused: Any) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        self._own.save(Path(save_directory))
        return (str(Path(save_directory) / self._own.file_name),)


class PanGuTokenizer(_Tokenizer):
    family = "pangu"


class CodeGeeXTokenizer(_Tokenizer):
    family = "codegeex"


class PaLMTokenizer(_Tokenizer):
    family = "palm"


def _array(ids: Any) -> NDArray[np.int64]:
    array = np.asarray(ids.asnumpy() if isinstance(ids, Tensor) else ids, np.int64)
    return array[None] if array.ndim == 1 else array


def _rows(ids: Any) -> list[Any]:
    """Rows of ids, of any lengths."""
    if isinstance(ids, (Tensor, np.ndarray)):
        return list(_array(ids))
    return [ids] if not ids or not isinstance(ids[0], (list, tuple, np.ndarray)) else list(ids)


def register() -> None:
    """Make MindFormers' Auto classes know the families, and its logger silent about what does not happen."""
    _logger.addFilter(lambda record: not any(words in record.getMessage() for words in NOISE))
    for config, model, tokenizer in (
        (PanGuConfig, PanGuForCausalLM, PanGuTokenizer),
        (CodeGeeXConfig, CodeGeeXForCausalLM, CodeGeeXTokenizer),
        (PaLMConfig, PaLMForCausalLM, PaLMTokenizer),
    ):
        _mindformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        _mindformers.AutoModel.register(config, model, exist_ok=True)
        _mindformers.AutoModelForCausalLM.register(config, model, exist_ok=True)
        _mindformers.AutoTokenizer.register(config, slow_tokenizer_class=tokenizer, exist_ok=True)


register()
