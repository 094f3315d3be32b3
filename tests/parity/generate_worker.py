# SPDX-License-Identifier: Apache-2.0
"""Generates in one process of a job, for test_generate_on_a_mesh."""

from pathlib import Path

from sporeloom.inference.config import GenerateConfig, check
from sporeloom.inference.session import open_session
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.environment import launched_processes

NEW_TOKENS = 16
KV_INT8 = ", KV int8"
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
    "penalized": {"temperature": 0.8, "top_k": 50, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "seed": 12},
}


def generate(checkpoint, prompts, strategy, *more):
    """What each sampling gives: {name: [[token, ...], ...]}, and the tokens' log-probabilities."""
    for weights in ("float32", "int8", *more):
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
