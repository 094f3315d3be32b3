# SPDX-License-Identifier: Apache-2.0
"""Published training runs of models with experts as the cost model's inputs. Values that a row leaves open are
filled in here."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.planner.cluster import Cluster, chips
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.published import CAPACITY_FACTOR, CUDNN_SPEED, Measurement, PublishedRun, UnpredictableError

COLUMNS = (
    *("id", "source", "model", "layers", "hidden", "heads", "kv_heads", "head_dim", "dense_ffn", "vocab", "experts"),
    *("topk", "shared_ffn", "expert_ffn", "first_dense", "seq", "chip", "devices", "precision", "global_batch"),
    *("microbatch", "tp", "pp", "vpp", "ep", "cp", "dp", "iter_s", "note"),
)
LATENT = re.compile(r"MLA\(q (\d+), kv (\d+)\)")
ROPE_DIM, VALUE_DIM = 64, 128
"""Widths of a head of DeepSeek's latent attention; its queries have both."""
ASCEND = "MindFormers"
ASSUMED = ("recompute", "zero")
"""Values that decide the memory and have no column."""


def is_of_experts(path: Path) -> bool:
    """Whether a CSV file has the columns of runs with experts."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return "expert_ffn" in next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False


def read_expert_rows(path: Path) -> list[dict[str, str]]:
    """The rows of such a file.

    Raises:
        ConfigError: columns are missing.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if missing := [name for name in COLUMNS if not rows or name not in rows[0]]:
        raise ConfigError(f"{path}: no rows, or columns are missing: {', '.join(missing)}")
    return [{name: row[name] or "" for name in COLUMNS} for row in rows]


def describe_experts(row: dict[str, str]) -> PublishedRun:
    """Model, strategy and cluster of a row; measured columns are not read.

    Raises:
        UnpredictableError: with the reason.
    """
    try:
        run = row["id"], row["source"], _dimensions(row), _parallelism(row), _cluster(row["chip"])
        return PublishedRun(*run, ASSUMED)
    except ValueError as error:
        raise UnpredictableError(f"not a number: {error}") from None
    except ConfigError as error:
        raise UnpredictableError(str(error)) from None


def measured_experts(row: dict[str, str]) -> Measurement:
    """Measurements in a row: its step time, which shows that it ran.

    Raises:
        UnpredictableError: not a number.
    """
    try:
        seconds = float(row["iter_s"] or 0) or None
        return Measurement(seconds, None, True if seconds else None)
    except ValueError as error:
        raise UnpredictableError(f"not a number: {error}") from None


def _cluster(chip: str) -> Cluster:
    for name, sheet in chips().items():
        if any(re.search(pattern, chip) for pattern in sheet["names"]):
            return Cluster.of_chip(name)
    raise UnpredictableError(f"chip {chip}: no data sheet is known")


def _dimensions(row: dict[str, str]) -> Dimensions:
    layers, hidden, heads = int(row["layers"]), int(row["hidden"]), int(row["heads"])
    experts, chosen = int(row["experts"]), int(row["topk"])
    latent = LATENT.search(row["kv_heads"])
    dims = Dimensions(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=0 if latent else int(row["kv_heads"] or 0),
        head_dim=int(row["head_dim"] or 0),
        vocab_size=int(row["vocab"]),
        seq_len=int(row["seq"]),
        ffn_hidden_size=int(row["dense_ffn"] or row["expert_ffn"]),
        num_experts=experts,
        experts_per_token=chosen,
        expert_ffn_size=int(row["expert_ffn"]),
        shared_ffn_size=int(row["shared_ffn"] or 0),
        expert_layers=layers - int(row["first_dense"] or 0),
        expert_rows=CAPACITY_FACTOR if "capacity" in row["note"] else 1.0,
        gated_mlp=True,
        position_tables=0,
        tied_embedding=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        norm_bias=False,
        dropout=False,
    )
    if latent is None:
        return dims
    q_rank, kv_rank = map(int, latent.groups())
    matrices = (
        hidden * (q_rank + kv_rank + ROPE_DIM)
        + q_rank * heads * (VALUE_DIM + ROPE_DIM)
        + kv_rank * heads * 2 * VALUE_DIM
        + heads * VALUE_DIM * hidden
    )
    # Scores have heads of both parts, contexts of one: their mean.
    return dataclasses.replace(dims, head_dim=VALUE_DIM + ROPE_DIM // 2, attention_matrices=matrices)


def _parallelism(row: dict[str, str]) -> Parallelism:
    dp, tp, pp, cp = (int(row[name] or 1) for name in ("dp", "tp", "pp", "cp"))
    ep, devices, batch = int(row["ep"] or 1), int(row["devices"]), int(row["global_batch"])
    if dp * tp * pp * cp != devices:
        raise UnpredictableError(f"dp {dp} x tp {tp} x pp {pp} x cp {cp} is not {devices} devices")
    if batch % dp:
        raise UnpredictableError(f"a batch of {batch} cannot be distributed to dp {dp}")
    microbatch = int(row["microbatch"] or 1)
    text = row["precision"].lower()
    is_ascend, is_fsdp = ASCEND in row["source"], "FSDP" in row["note"]
    return Parallelism(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expert_tp=0 if is_ascend else 1,  # Megatron's runs shard experts over ep alone
        sends_once=not is_ascend,
        virtual_stages=max(1, int(row["vpp"] or 1)),
        microbatch=microbatch,
        num_microbatches=max(1, batch // dp // microbatch),
        recompute="full" if is_ascend else "selective",
        zero=3 if is_fsdp or is_ascend else 1,
        gathers="step",
        sequence_parallel=tp > 1,
        flash_attention=True,
        attention_speed=1.0 if is_ascend else CUDNN_SPEED,
        precision="fp8" if "fp8" in text else "fp16" if "fp16" in text else "bf16",
    )
