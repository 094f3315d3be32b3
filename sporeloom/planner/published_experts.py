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
from sporeloom.planner.published import CUDNN_SHARE, Measurement, PublishedRun, UnpredictableError
from sporeloom.planner.recipe_memory import ROPE_DIM, VALUE_DIM
from sporeloom.planner.recipes import WHOLE_LAYER, Recipe, recipes

COLUMNS = (
    *("id", "source", "model", "layers", "hidden", "heads", "kv_heads", "head_dim", "dense_ffn", "vocab", "experts"),
    *("topk", "shared_ffn", "expert_ffn", "first_dense", "seq", "chip", "devices", "precision", "global_batch"),
    *("microbatch", "tp", "pp", "vpp", "ep", "cp", "dp", "iter_s", "note"),
)
LATENT = re.compile(r"MLA\(q (\d+), kv (\d+)\)")
ASCEND = "MindFormers"
UNKNOWN = Recipe()
"""Settings of a run whose recipe is not public."""
MLA_UP = "mla_up_proj"
FEATURES_OF = {"layernorm": lambda dims: 4 * dims.hidden_size, "moe_act": lambda dims: 3 * _expert_features(dims)}
"""Values of a token that these modules read and write once more."""
ASSUMED = ("recompute", "zero", "experts")
"""Settings that have no column, and are open where no recipe is public. MindFormers' files leave open how rows are
exchanged."""


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
        recipe = recipes().get(row["id"], UNKNOWN)
        dims = _dimensions(row, recipe)
        run = row["id"], row["source"], dims, _parallelism(row, dims, recipe), _cluster(row["chip"])
        return PublishedRun(*run, ASSUMED if recipe is UNKNOWN else ("experts",) if ASCEND in row["source"] else ())
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


def _dimensions(row: dict[str, str], recipe: Recipe) -> Dimensions:
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
        expert_rows=recipe.capacity,
        gated_mlp=True,
        position_tables=0,
        tied_embedding=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        norm_bias=False,
        dropout=False,
        mtp_layers=recipe.mtp,
    )
    if latent is None:
        return dims
    q_rank, kv_rank = map(int, latent.groups())
    matrices = hidden * (q_rank + kv_rank + ROPE_DIM) + heads * VALUE_DIM * hidden + _up_projections(row)
    # Scores have heads of both parts, contexts of one: their mean.
    return dataclasses.replace(dims, head_dim=VALUE_DIM + ROPE_DIM // 2, attention_matrices=matrices)


def _up_projections(row: dict[str, str]) -> int:
    """Entries of the matrices that make heads of latents; 0: there are none."""
    latent = LATENT.search(row["kv_heads"])
    if latent is None:
        return 0
    q_rank, kv_rank = map(int, latent.groups())
    return int(row["heads"]) * (q_rank * (VALUE_DIM + ROPE_DIM) + kv_rank * 2 * VALUE_DIM)


def _expert_features(dims: Dimensions) -> int:
    """Width of the experts of a token, the shared one among them."""
    return dims.experts_per_token * dims.expert_ffn_size + dims.shared_ffn_size


def _parallelism(row: dict[str, str], dims: Dimensions, recipe: Recipe) -> Parallelism:
    dp, tp, pp, cp = (int(row[name] or 1) for name in ("dp", "tp", "pp", "cp"))
    ep, devices, batch = recipe.ep or int(row["ep"] or 1), int(row["devices"]), int(row["global_batch"])
    if dp * tp * pp * cp != devices:
        raise UnpredictableError(f"dp {dp} x tp {tp} x pp {pp} x cp {cp} is not {devices} devices")
    if batch % dp:
        raise UnpredictableError(f"a batch of {batch} cannot be distributed to dp {dp}")
    microbatch = int(row["microbatch"] or 1)
    virtual_stages = max(1, int(row["vpp"] or 1))
    text = row["precision"].lower()
    is_ascend, is_fsdp = ASCEND in row["source"], "FSDP" in row["note"]
    return Parallelism(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expert_tp=0 if is_ascend else 1,  # Megatron's runs shard experts over ep alone
        sends_once=recipe.library and not is_ascend,
        overlaps_experts=recipe.overlap,
        overlaps_sends=not is_ascend,
        overlaps_new_weights=not is_ascend,
        captured=recipe.captured,
        reduced_bytes=4 if is_ascend else 2,
        virtual_stages=virtual_stages,
        layers_of_stages=recipe.layers_of_stages(dims.num_layers, pp, virtual_stages),
        microbatch=microbatch,
        num_microbatches=max(1, batch // dp // microbatch),
        recompute="full" if is_ascend or WHOLE_LAYER in recipe.repeats else "selective" if recipe.repeats else "none",
        repeated_entries=_up_projections(row) * (MLA_UP in recipe.repeats),
        repeated_features=sum(of(dims) for name, of in FEATURES_OF.items() if name in recipe.repeats),
        zero=3 if is_fsdp or is_ascend else 1,
        gathers="step",
        sequence_parallel=tp > 1 and recipe.shards_sequences,
        flash_attention=recipe.flash,
        attention_share=CUDNN_SHARE if recipe.cudnn and not is_ascend else 0.0,
        precision="fp8" if "fp8" in text else "fp16" if "fp16" in text else "bf16",
        **recipe.state_bytes,
    )
