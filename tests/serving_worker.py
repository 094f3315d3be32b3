# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods by our own scorer and states of the model, for test_serve and test_serve_embeddings."""

from pathlib import Path

import numpy as np
from mindspore import Tensor

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.data.tokenizer import find_tokenizer, load_tokenizer
from sporeloom.inference.model import load_model
from sporeloom.inference.score import Scorer, negative_log_likelihood
from sporeloom.nn.decoder import HiddenStates
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


def head_inputs(checkpoint, texts):
    """Inputs of the head for each token of each text, of the model without caches."""
    folder = Path(checkpoint)
    family, config = load_config(folder)
    tokenizer = load_tokenizer(family, find_tokenizer(family, folder), config)
    engine = Engine.start(SINGLE_DEVICE)
    net = load_model(folder, family, config, SINGLE_DEVICE, gives_states=True)
    states, found = HiddenStates(net).set_train(False), []
    for text in texts:
        ids = np.asarray([tokenizer.encode(text)], np.int32)
        places = np.arange(ids.shape[1], dtype=np.int32)
        rows = engine.run(states, Tensor(ids), Tensor(places[None]), Tensor(places)).asnumpy()
        logits = engine.run(net, Tensor(ids), Tensor(places[None])).asnumpy()
        table = net.embedding.word.weight.asnumpy()
        np.testing.assert_allclose(rows @ table.T, logits, rtol=0, atol=1e-4)  # the head is tied
        found.append(rows.tolist())
    return found
