# SPDX-License-Identifier: Apache-2.0
"""Generates in one process of a job, for test_generate_on_a_mesh."""

import dataclasses
from pathlib import Path

import numpy as np

from sporeloom.checkpoint.model_folder import save_checkpoint
from sporeloom.core.lines import file_lines
from sporeloom.data.tokenizer import load_tokenizer
from sporeloom.inference.config import GenerateConfig, check
from sporeloom.inference.session import open_session
from sporeloom.models.config_file import config_with_file
from sporeloom.models.family import family_module, size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.environment import launched_processes

NEW_TOKENS = 16
KV_INT8 = ", KV int8"
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
    "penalized": {"temperature": 0.8, "top_k": 50, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "seed": 12},
}


def generate(checkpoint, prompts, strategy, *kinds):
    """What each sampling gives with float32 and, greedily, with other `kinds` of weights: {name: [[token, ...], ...]}; and
    the tokens' log-probabilities."""
    for weights in ("float32", *kinds):
        common = {"checkpoint": Path(checkpoint), "prompt_file": Path(prompts), "max_new_tokens": NEW_TOKENS}
        common |= {
            "strategy": None if strategy == "one_device" else Path(strategy),
            "weights": weights.removesuffix(KV_INT8),
            "kv_cache": "int8" if weights.endswith(KV_INT8) else "auto",
            "batch_size": 2,
        }
        job = check(GenerateConfig(**common), launched_processes())
        if weights == "float32":
            engine, found = Engine.start(job.strategy), {}
        session = open_session(job, engine)
        for name, values in SAMPLINGS.items():
            if weights != "float32" and name != "greedy":
                continue
            done = session.complete(job.prompts, GenerateConfig(**common, **values), NEW_TOKENS)
            found[f"{weights} {name}"] = [completion.tokens for completion in done]
            found[f"{weights} {name} log-probabilities"] = [completion.log_probabilities for completion in done]
    return found if engine.is_log_rank else None


def random_checkpoint(folder, size, config_file, text):
    """A checkpoint of a model with random weights, large enough that its tokens differ. Returns its folder."""
    folder, draw = Path(folder), np.random.default_rng(3)
    config = config_with_file(Path(config_file), size_config("pangu", size), "pangu")
    config = dataclasses.replace(config, seq_len=64)
    weights = {
        name: (draw.standard_normal(shape, np.float32) * 0.1) + ("norm" in name and name.endswith("weight"))
        for name, shape in parameter_shapes(config).items()
    }
    model = family_module("pangu", "tokenizer").train_tokenizer(file_lines(Path(text)), config.vocab_size)
    (folder / "tokenizer.model").write_bytes(model)
    tokenizer = load_tokenizer("pangu", folder / "tokenizer.model", config)
    save_checkpoint(folder / "checkpoint", weights, "pangu", config, tokenizer.save)
    return str(folder / "checkpoint")
