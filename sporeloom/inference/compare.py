# SPDX-License-Identifier: Apache-2.0
"""Compare the logits of two checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.inference.score import Scorer
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.config import SINGLE_DEVICE

SHAPE = (2, 64)


def largest_difference(*folders: Path) -> float:
    """Maximum difference of any logit, on the same random tokens. The models have one vocabulary and are loaded
    one after the other."""
    prepare_environment()
    engine, logits = Engine.start(SINGLE_DEVICE), []
    for folder in folders:
        family, config = load_config(folder)
        shape = SHAPE[0], min(SHAPE[1], config.seq_len)
        ids = np.random.default_rng(0).integers(0, config.vocab_size, shape)
        found = Scorer(engine, folder, family, config).logits(ids, None)
        assert found is not None
        logits.append(found)
    return float(np.abs(logits[0] - logits[1]).max())
