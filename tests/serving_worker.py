# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods by our own scorer, for test_serve."""

from pathlib import Path

import numpy as np

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.data.tokenizer import find_tokenizer, load_tokenizer
from sporeloom.inference.score import Scorer, negative_log_likelihood
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE


def likelihoods(checkpoint, pairs):
    """Of the second text of each pair, behind the first."""
    folder = Path(checkpoint)
    family, config = load_config(folder)
    tokenizer = load_tokenizer(family, find_tokenizer(family, folder), config)
    scorer, found = Scorer(Engine.start(SINGLE_DEVICE), folder, family, config), []
    for before, after in pairs:
        whole, length = tokenizer.encode(before + after), len(tokenizer.encode(before))
        logits = scorer.logits(np.asarray([whole]), None)
        nll = negative_log_likelihood(logits[:, :-1], np.asarray([whole[1:]]))[0]
        found.append(-float(nll[length - 1 :].sum()))
    return found
