# SPDX-License-Identifier: Apache-2.0
"""Trains PanGu or CodeGeeX tiny and writes what it did, for test_equal_to_one_device."""

import dataclasses
import json
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindloom.data.batch import dropout_keys, make_batch
from mindloom.family import family_module, size_config
from mindloom.parallel.parallelize import parallelize, wrap
from mindloom.parallel.step import TrainStep
from mindloom.runtime.engine import Engine
from mindloom.runtime.gather import gather_whole
from mindloom.strategy.config import SINGLE_DEVICE, Pipeline
from mindloom.strategy.loader import load_strategy
from mindloom.train.optim import SGD, AdamW

STEPS, BATCH = 5, 8
SMALL = {"vocab_size": 128, "hidden_size": 64, "seq_len": 32}


def batches(config):
    """Random tokens in documents of several lengths, with positions that are not trained on."""
    rng = np.random.RandomState(0)
    for step in range(STEPS):
        samples = rng.randint(10, config.vocab_size, (BATCH, config.seq_len + 1))
        samples[rng.rand(*samples.shape) < 0.08] = config.eod_id
        samples[:3, 20:] = config.loss_ignore_id  # unequal in the parts of the batch
        inputs = [*make_batch(samples, config.eod_id, config.loss_ignore_id)]
        if config.dropout_rate:
            inputs.append(dropout_keys(3, step * BATCH * config.seq_len, (BATCH, config.seq_len)))
        yield [Tensor(array) for array in inputs]


class BothOptimizers(nn.Cell):
    """AdamW and SGD in one graph, to compile each case once; the one with rate 0 changes nothing."""

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        self.adam, self.sgd = AdamW(parameters), SGD(parameters)
        self.sgd.rate.name = "sgd_rate"
        self.parameters = self.adam.parameters

    def construct(self, gradients):
        return self.sgd(ops.depend(gradients, self.adam(gradients)))


def train(path: str, options: list[str], out: str) -> None:
    """Five steps of each optimizer. Writes OUT.OPTIMIZER.json (losses, norms) and .npz (gradients or weights).

    `path`: a strategy file, or one_device. `options`: of clip, accumulate, after_query, codegeex, dropout, and shallow
    (2 layers and 2 microbatches, which compile in half the time).
    """
    strategy = SINGLE_DEVICE if path == "one_device" else load_strategy(path)
    accumulate = 2 if "accumulate" in options else 1
    family = "codegeex" if "codegeex" in options else "pangu"
    final_norm = "after_query" if "after_query" in options else "before_query"
    config = dataclasses.replace(size_config(family, "tiny"), final_norm=final_norm, **SMALL)
    if "dropout" in options:
        config = dataclasses.replace(config, dropout_rate=0.1)
    if "shallow" in options:
        config = dataclasses.replace(config, num_layers=2)
        if strategy.mesh.pp > 1:
            strategy = dataclasses.replace(strategy, pipeline=Pipeline(num_microbatches=2))
    engine, parts = Engine(strategy), Path(f"{out}.parts")
    ms.set_seed(3)
    net = family_module(family, "model").ModelWithLoss(config)
    report = parallelize(net, strategy)
    optimizer = BothOptimizers(net.trainable_params())
    step = TrainStep(
        wrap(net, strategy, accumulate),
        optimizer,
        report,
        engine.rank,
        engine.all_reduce(),
        max_grad_norm=0.5 if "clip" in options else None,
        accumulate=accumulate,
    ).set_train()
    step.graph_key = {"parity": family, "config": config.to_dict(), "options": options}
    engine.prepare(step, *next(batches(config)))
    start = {parameter.name: parameter.asnumpy().copy() for parameter in step.get_parameters()}
    for name, rates in (("AdamW", (1e-3, 0.0)), ("SGD", (0.0, 0.1))):
        for parameter in step.get_parameters():
            parameter.set_data(Tensor(start[parameter.name]))
        losses, norms, tensors = [], [], {}
        for index, batch in enumerate(batches(config)):
            optimizer.adam.prepare(index + 1, rates[0])
            optimizer.sgd.prepare(index + 1, rates[1])
            loss, norm = engine.run(step, *batch)
            losses.append(float(loss.asnumpy().reshape(())))
            norms.append(float(norm.asnumpy().reshape(())))
            if index == 0 and name == "AdamW":  # m = (1 - beta1) g after the first step
                tensors = gather_whole(step, engine, report, parts, lambda n: n.startswith("adam_m."))
        if name == "SGD":
            tensors = gather_whole(step, engine, report, parts, lambda n: n.startswith("model."))
        if tensors is not None:
            np.savez(f"{out}.{name}.npz", **tensors)
        if engine.speaks:
            Path(f"{out}.{name}.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    check_report(report, engine)
    engine.close()


def check_report(report, engine):
    """What `parallelize` foresaw is what the compiler did."""
    for program in engine._programs.values():
        for parameter in report.parameters:
            found = program.graph.parameters.get(parameter.name)
            if found is not None and parameter.stage == engine.strategy.mesh.coordinate(engine.rank, "pp"):
                assert found == parameter.local_shape, (parameter, found)
