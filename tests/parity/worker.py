# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model and writes what it did, for test_equal_to_one_device and test_modern_models."""

import dataclasses
from pathlib import Path

from mindloom.certification.training import train_decoder
from mindloom.models.family import size_config
from mindloom.strategy.config import SINGLE_DEVICE, Pipeline
from mindloom.strategy.loader import load_strategy

BATCH = 8
SMALL = {"vocab_size": 128, "hidden_size": 64, "seq_len": 32}
MODELS = {
    "pangu": ("pangu", "tiny", {}),
    "codegeex": ("codegeex", "tiny", {}),
    "embedded": ("pangu", "embedded_tiny", {}),
    "ultra": ("pangu", "embedded_tiny", {"block": "sandwich", "sandwich_gains": (0.5, 0.7), "tied_embedding": False}),
    "codegeex4": ("codegeex", "4_tiny", {}),
    "palm": ("palm", "tiny", {}),
}


def train(path: str, options: list[str], out: str) -> None:
    """Five steps of each optimizer. Writes OUT.OPTIMIZER.json (losses, norms) and .npz (gradients or weights).

    `path`: a strategy file, or one_device. `options`: one of MODELS, and of clip, accumulate, after_query, dropout, and
    shallow (2 layers and 2 microbatches, which compile in half the time).
    """
    strategy = SINGLE_DEVICE if path == "one_device" else load_strategy(path)
    family, size, changes = MODELS[next((option for option in options if option in MODELS), "pangu")]
    final_norm = "after_query" if "after_query" in options else "before_query"
    config = dataclasses.replace(size_config(family, size), final_norm=final_norm, **SMALL, **changes)
    if "dropout" in options:
        config = dataclasses.replace(config, dropout_rate=0.1)
    if "shallow" in options:
        config = dataclasses.replace(config, num_layers=2)
        if strategy.mesh.pp > 1:
            strategy = dataclasses.replace(strategy, pipeline=Pipeline(num_microbatches=2))
    accumulate, clip = 2 if "accumulate" in options else 1, 0.5 if "clip" in options else None
    engine, report = train_decoder(family, config, strategy, Path(out), BATCH, accumulate, clip)
    check_report(report, engine)
    engine.close()


def check_report(report, engine):
    """What `parallelize` foresaw is what the compiler did."""
    for program in engine._programs.values():
        for parameter in report.parameters:
            found = program.graph.parameters.get(parameter.name)
            if found is not None and parameter.stage == engine.strategy.mesh.coordinate(engine.rank, "pp"):
                assert found == parameter.local_shape, (parameter, found)
