# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model and writes what it did, for test_equal_to_one_device and test_modern_models."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import mindspore as ms
import numpy as np

from sporeloom.certification.training import decoder_batches, train_decoder, train_steps
from sporeloom.checkpoint.contents import is_orthogonalized
from sporeloom.data.random_ltd import draw_kept
from sporeloom.models.cells import ClippedAttention
from sporeloom.models.family import family_module, size_config
from sporeloom.nn.token_drop import attach_token_drop
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.gather import gather_whole
from sporeloom.strategy.config import SINGLE_DEVICE, Offload, OptimizerParallel, Pipeline, Recompute
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.train.adafactor import Adafactor
from sporeloom.train.muon import Muon
from sporeloom.train.optim import AdamW
from sporeloom.train.qk_clip import QKClip

BATCH = 8
QK_CLIP_THRESHOLD = 0.3
STREAMS = {"num_streams": 2, "rounds": 2, "norm_layers": (1,)}
"""Each of 20 rounds would be compiled; the values of all are those of the reference (tests/unit/test_openpangu_2.py)."""
INDEXER = {"layers": (0, 1), "top_k": 6, "num_heads": 2, "head_dim": 16, "loss_coefficient": 100.0}
"""Its gradients then are about as large as others: the scores of initial weights differ little."""
OPENPANGU_2 = {"windows": (0, 5, 0, 5, 7), "indexer": INDEXER, "streams": STREAMS}
PHASES = (((3.4445, -4.7750, 2.0315), 1), ((2.0, -1.5, 0.5), 1))
"""Of Muon: each of five iterations would be compiled for each matrix; test_muon has the golden updates of all."""
SMALL = {"vocab_size": 128, "hidden_size": 64, "seq_len": 32}
EXPERTS = {
    "num_experts": 4,
    "capacity_factor": 1.0,
    "ffn_hidden_size": 96,
    "balance_loss": 0.05,
    "router_z_loss": 0.01,
}
BALANCED = {"normalize": "before_drop", "balance_bias_rate": 0.1}
MOGE = {
    "experts_per_token": 2,
    "router": "grouped",
    "router_scale": True,
    "balance_over": "batch",
    "shared_ffn_hidden_size": 64,
    "balance_bias_rate": 0.1,
}
GROUPS = {
    "num_experts": 8,
    "experts_per_token": 2,
    "router": "sigmoid",
    "num_groups": 4,
    "groups_per_token": 2,
    "ffn_hidden_size": 64,
    "shared_ffn_hidden_size": 64,
    "first_dense_layers": 1,
    "routed_scaling_factor": 2.5,
    **BALANCED,
}
DROPLESS = {"num_experts": 4, "experts_per_token": 2, "ffn_hidden_size": 96, "balance_loss": 0.05, **BALANCED}
SIGMA = {"num_experts": 4, "experts_per_token": 1, "router": "hash", "num_domains": 2}
MODELS = {
    "pangu": ("pangu", "tiny", {}),
    "codegeex": ("codegeex", "tiny", {}),
    "embedded": ("pangu", "embedded_tiny", {}),
    "ultra": ("pangu", "embedded_tiny", {"block": "sandwich", "sandwich_gains": (0.5, 0.7), "tied_embedding": False}),
    "codegeex4": ("codegeex", "4_tiny", {}),
    "palm": ("palm", "tiny", {}),
    "moe": ("pangu", "tiny", {"experts": {**EXPERTS, "experts_per_token": 2, **BALANCED}}),
    "moge": ("pangu", "embedded_tiny", {"experts": {**EXPERTS, **MOGE}}),
    "latent": ("pangu", "ultra_moe_tiny", {"experts": None}),
    "two": ("pangu", "2_tiny", {"experts": None, **OPENPANGU_2}),
    "latent_indexer": ("pangu", "ultra_moe_tiny", {"experts": None, "indexer": INDEXER}),
    "dropless": ("pangu", "tiny", {"experts": DROPLESS}),
    "hash_dropless": ("pangu", "tiny", {"experts": SIGMA}),
    "latent_moe": ("pangu", "ultra_moe_tiny", {"experts": GROUPS}),
}


def train(path: str, options: list[str], out: str) -> None:
    """Five steps of each optimizer. Writes OUT.OPTIMIZER.json (losses, norms) and .npz (gradients or weights).

    `path`: a strategy file, or one_device. `options`: one of MODELS, and of clip, accumulate, copies, after_query, dropout,
    offload, again (weights are gathered twice), shards (gradients of microbatches),
    ep_over_tp (experts over all four ranks, each of them whole), cp_for_tp (sequences over what is tp in the file), no_ep
    (all experts on each rank), and shallow (2 layers, which compile in half the time).
    A pipeline has as many microbatches as stages, for the same reason.
    """
    strategy = SINGLE_DEVICE if path == "one_device" else load_strategy(path)
    family, size, changes = MODELS[next((option for option in options if option in MODELS), "pangu")]
    final_norm = "after_query" if "after_query" in options else "before_query"
    asked = {"final_norm": final_norm, **({"dropout_rate": 0.1} if "dropout" in options else {})}
    config = dataclasses.replace(size_config(family, size), **asked, **SMALL, **changes)
    if "flash" in options and strategy.mesh.size > 1:  # one device computes it plainly
        config = dataclasses.replace(config, attention="flash")
    if "shallow" in options:
        config = config.with_layers(2)
    if strategy.mesh.pp > 1:
        pipeline = dataclasses.replace(strategy.pipeline, num_microbatches=strategy.mesh.pp)
        strategy = dataclasses.replace(strategy, pipeline=pipeline)
    if "offload" in options and strategy.mesh.size > 1:
        strategy = dataclasses.replace(strategy, offload=Offload(optimizer=True, layers="all"))
    if "again" in options and strategy.mesh.size > 1:
        shards = 2 if strategy.mesh.dp == 4 else None
        zero = OptimizerParallel(shard_size=shards, reshard_after_forward=True)
        recompute = Recompute() if strategy.mesh.tp > 1 else None
        strategy = dataclasses.replace(strategy, optimizer_parallel=zero, recompute=recompute)
    if "shards" in options and strategy.mesh.size > 1:
        strategy = dataclasses.replace(strategy, optimizer_parallel=OptimizerParallel(shard_accumulated_gradients=True))
    if "ep_over_tp" in options and strategy.mesh.size > 1:
        strategy = dataclasses.replace(strategy, mesh=Mesh(dp=2, ep=4, tp=2))
    if "cp_for_tp" in options and strategy.mesh.size > 1:
        strategy = dataclasses.replace(strategy, mesh=Mesh(dp=2, ep=2, cp=2))
    if "no_ep" in options and strategy.mesh.size > 1:
        strategy = dataclasses.replace(strategy, mesh=dataclasses.replace(strategy.mesh, ep=1))
    if "copies" in options and strategy.mesh.size > 1:
        strategy = dataclasses.replace(strategy, micro_batch_interleave=2)
    accumulate, clip = 2 if "accumulate" in options else 1, 0.5 if "clip" in options else None
    if "dropping" in options:
        engine, report = train_dropping(family, config, strategy, Path(out))
    else:
        engine, report = train_decoder(family, config, strategy, Path(out), BATCH, accumulate, clip)
    check_report(report, engine)
    if config.attention == "flash" and strategy.mesh.size > 1:
        kinds = {p.op_type for graph in graphs_of(engine) for p in graph.model.primitives}
        assert {"FlashAttentionScore", "FlashAttentionScoreGrad"} <= kinds
    if strategy.is_spmd and engine.is_log_rank:
        unsharded, kinds = Counter(), Counter()
        for sharded in engine.backend.sharded:
            unsharded += sharded.unsharded
            kinds += Counter(f"{c.kind} over {', '.join(c.axes)}" for c in sharded.communications)
        Path(f"{out}.sharded.json").write_text(json.dumps({"unsharded": unsharded, "communications": kinds}))
    engine.close()


def train_dropping(family, config, strategy, out):
    """With random-LTD: two layers see 24 of 32 tokens, others in each step; where there are more, not the first or last."""
    layers, shape = (1, 2) if config.num_layers > 2 else (0, 1), (BATCH, config.seq_len)

    def build():
        net = family_module(family, "model").ModelWithLoss(config)
        attach_token_drop(net.model, layers)
        return net

    def batches():
        for step, batch in enumerate(decoder_batches(config, BATCH)):
            yield [*batch, *map(ms.Tensor, draw_kept(5, step, layers, np.arange(BATCH), shape, 24))]

    return train_steps(build, batches, strategy, out)


def train_optimizer(path: str, options: list[str], out: str) -> None:
    """Five steps of Adafactor, or with the option `muon` of Muon, with `narrow` and bfloat16 states; `adamw`: of AdamW. With
    `qk_clip` heads are clipped, of which initial weights are large. Writes OUT.json (losses; then also what was counted) and
    OUT.npz (weights)."""
    strategy = SINGLE_DEVICE if path == "one_device" else load_strategy(path)
    family, size, changes = MODELS[next(option for option in options if option in MODELS)]
    config = dataclasses.replace(size_config(family, size), num_layers=2, **SMALL, **changes)
    if strategy.mesh.pp > 1:
        strategy = dataclasses.replace(strategy, pipeline=Pipeline(num_microbatches=2))
    accumulate, clips = 2 if "accumulate" in options else 1, "qk_clip" in options
    engine = Engine.start(strategy)
    ms.set_seed(3)
    net = family_module(family, "model").ModelWithLoss(config)
    if clips:
        net.model.attach_max_logits()
    for parameter in net.get_parameters() if clips else ():
        if any(
            part in parameter.name for part in (".query.weight", ".query_up.weight", ".key.weight", ".kv_up.weight")
        ):
            parameter.set_data(ms.Tensor(parameter.asnumpy() * np.float32(6)))
    report = parallelize(net, strategy)
    weights, own = net.trainable_params(), {parameter.name for parameter in net.get_parameters()}
    shares, all_reduce = report.norm_shares([weight.name for weight in weights], engine.rank), engine.all_reduce()
    if "muon" in options:
        states = "bfloat16" if "narrow" in options else "float32"
        # rounding must not decide a sign
        optimizer = Muon(weights, is_orthogonalized, phases=PHASES, adam_epsilon=1e-3, state_dtype=states)
    elif "adamw" in options:
        optimizer = AdamW(weights, epsilon=1e-3, bias_correction=True)
    else:
        optimizer = Adafactor(weights, shares, all_reduce, "factored" in options, weight_decay=1.0)
    attentions = [cell for _, cell in net.cells_and_names() if isinstance(cell, ClippedAttention)]
    step = TrainStep(
        wrap(net, strategy, accumulate),
        optimizer,
        report,
        engine.rank,
        all_reduce,
        accumulate=accumulate,
        qk_clip=QKClip(QK_CLIP_THRESHOLD, attentions) if clips else None,
    ).set_train()
    engine.prepare(step, *next(decoder_batches(config, BATCH)))
    losses, counts = [], []
    for number, batch in enumerate(decoder_batches(config, BATCH), 1):
        optimizer.prepare(number, 0.003 if clips else 0.01 if "muon" in options else 0.03)
        loss, _, *counted = engine.run(step, *batch)
        losses.append(float(loss.asnumpy().reshape(())))
        counts += [array.asnumpy().tolist() for array in counted]
    tensors = gather_whole(step, engine, report, Path(f"{out}.parts"), own.__contains__)
    if tensors is not None:
        np.savez(f"{out}.npz", **tensors)
    if engine.is_log_rank:
        Path(f"{out}.json").write_text(json.dumps({"losses": losses, "counts": counts} if clips else losses))
    engine.close()


def graphs_of(engine):
    """What CPU processes execute; one device has none."""
    return [graph for program in getattr(engine.backend, "programs", {}).values() for graph in program.graphs]


def check_report(report, engine):
    """What `parallelize` foresaw is what the compiler did."""
    for graph in graphs_of(engine):
        for parameter in report.parameters:
            found = graph.parameters.get(parameter.name)
            if found is not None and parameter.stage == engine.strategy.mesh.coordinate(engine.rank, "pp"):
                assert found == parameter.local_shape, (parameter, found)
