# SPDX-License-Identifier: Apache-2.0
"""Published training runs as the cost model's inputs, with their measured values.

What a row leaves open is filled in by the rules below, which look at model, chip and strategy only.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.planner.cluster import Cluster, chips
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism

GATED = re.compile(r"llama|qwen|baichuan|internlm|\byi|deepseek|glm|telechat|mixtral|aquila|palm", re.I)
NEEDED = ("model", "layers", "hidden", "heads", "seq", "chip", "devices", "tp", "pp", "global_batch")
COLUMNS = (
    *NEEDED,
    *(
        "id",
        "source",
        "note",
        "mem_gb",
        "vocab",
        "ffn",
        "vpp",
        "microbatch",
        "zero",
        "precision",
        "recompute",
        "iter_s",
    ),
)
PERFORMANCE = ("tflops_per_device", "mfu_pct", "hfu_pct")
"""Columns that also show that a run ran; a file need not have them."""
SPEEDS = ("tps_dev", "tok_s", "derived_tps_dev", "derived_tok_s")
"""The same, in notes."""
ZERO = {"": 0, "dist-opt": 1, "FSDP": 3, "ms-opt-parallel": 3}
JEAN_ZAY_GB_PER_S = 50.0
"""Network of a node of 8 A100 of Jean Zay: 4 Omni-Path links of 100 Gb/s (model card of BLOOM)."""
TORCHTITAN = re.compile(r"torchtitan")
"""Keeps weights gathered over all microbatches of a pipeline, of which there are by default as many as stages. In fp8 with
one scale for each tensor, all-gathers of tensor parallel are in fp8 (docs/float8.md at 9dec370 and 820504e)."""
MEGATRON = re.compile(r"Megatron-Bridge|NeMo-Framework-Launcher")
"""Sources whose recipes are public like the figures: sequences are sharded wherever tensors are; in fp8, on Hopper,
attention is cuDNN's, collectives of tensor parallel run over user buffers while products are computed, and interleaved
stages send while they compute."""
CUDNN_SHARE = 0.5
"""Fraction of the peak that cuDNN's attention kernels reach on Hopper and Blackwell, both passes together. On H100, heads of
128 and no mask: forward 595 to 617 TFLOP/s, backward 499 to 518 (arXiv:2407.08608 figures 5 and 6); with a mask less. On B200
forward 0.55 (FlashAttention-4's abstract). The runs of dense models elsewhere have kernels of PyTorch and Triton."""
AFTER_THE_PASSES = re.compile(r"arXiv:2104\.04473|arXiv:2205\.05198|arXiv:2201\.11990|^bigscience|nv-adlr")
"""Sources whose engines reduce gradients when all passes are done: Megatron-LM before its --overlap-grad-reduce of 2023, and
DeepSpeed's pipelines. In OneFlow's report Megatron's rows, too."""
DEEPSPEED_2021 = re.compile(r"arXiv:2104\.04473")
TENSORS_OF_LAYER = 4
"""Matrices of a layer, which ZeRO 3 of DeepSpeed gathered one by one in 2021."""
ASSUMED_VOCABULARY = 50_000
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"experts_per_token": 2, "expert_ffn_size": 14336, "shared_ffn_size": 0, "first_dense": 0},
    "deepseek2-236b": {"experts_per_token": 6, "expert_ffn_size": 1536, "shared_ffn_size": 3072, "first_dense": 1},
    "qwen2-57b-a14b": {"experts_per_token": 8, "expert_ffn_size": 2560, "shared_ffn_size": 20480, "first_dense": 0},
}
"""Dimensions that the rows of models with experts leave open. Source: their published config.json."""
CAPACITY_FACTORS = {"mixtral-8x7b": 1.1, "deepseek2-236b": 2.0, "qwen2-57b-a14b": 1.1}
"""`capacity_factor` in MindFormers' files of these models, at the commits that the rows name."""
CORRECTIONS = {
    # MindFormers' tables have another SeqLength than the files that they name, and one more kernel (FA).
    "mf_r1.0_llama2_7b_FA_3250": {"seq": "2048"},
    "mf_r1.0_llama2_13b_FA_1812": {"seq": "2048", "note": "flash_attn=true"},
    "mf_r1.3.0_deepseek1.5-7b_340": {"seq": "8192"},
    # models/llama/llama.py at d578c60: select_recompute in place of recompute; since r1.2 the other way round
    "mf_r0.8_llama2_7b_3523": {"recompute": "selective"},
    # AscendSpeed's scripts at 64b1937: --recomputation-layer-num 3 2 1 0 0 0 0 0; no --use-flash-attn
    "ascendspeed_llama_13b_8p": {"note": "recompute=[3,2,1,0,0,0,0,0]"},
    "ascendspeed_baichuan_13b": {"note": "flash_attn=false"},
}
"""Columns of rows that are otherwise in their sources, read again; notes come first."""


class UnpredictableError(Exception):
    """A row cannot be predicted; the message says why."""


@dataclass(frozen=True)
class PublishedRun:
    """Model, strategy and cluster of a run."""

    id: str
    source: str
    dims: Dimensions
    job: Parallelism
    cluster: Cluster
    assumed: tuple[str, ...] = ()
    """Values that decide the memory and are not published: filled in by the rules here."""


@dataclass(frozen=True)
class Measurement:
    """Published measurements of a run."""

    seconds: float | None
    memory_bytes: float | None
    fits: bool | None
    """Whether it ran; None: unknown."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with the columns of published runs.

    Raises:
        ConfigError: unreadable, or columns are missing.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: not CSV: {error}") from None
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise ConfigError(f"{path}: no rows, or columns are missing: {', '.join(missing)}")
    return [
        corrected({name: row.get(name) or "" for name in (*COLUMNS, *PERFORMANCE)}) for row in rows
    ]  # short rows lack the last


def corrected(row: dict[str, str]) -> dict[str, str]:
    """A row as its source has it. Step times that follow from tokens/s are those of its length."""
    new = dict(CORRECTIONS.get(row["id"], {}))
    if "note" in new:
        new["note"] += f"; {row['note']}"
    if "seq" in new and row["seq"]:
        new["iter_s"] = str(float(row["iter_s"]) * int(new["seq"]) / int(row["seq"]))
    return {**row, **new}


def noted(row: dict[str, str], key: str) -> str:
    """The value of `key=` in a row's note, or an empty text."""
    found = re.search(rf"(?:^|[;, ]){re.escape(key)}=(\[[^\]]*\]|[^;, ]*)", row["note"])
    return found[1] if found else ""


def describe(row: dict[str, str]) -> PublishedRun:
    """Model, strategy and cluster of a row; measured columns are not read.

    Raises:
        UnpredictableError: with the reason.
    """
    if missing := [name for name in NEEDED if not row[name]]:
        raise UnpredictableError(f"no {', '.join(missing)}")
    if "MoE" in row["note"] and row["model"] not in WITH_EXPERTS:
        raise UnpredictableError("mixture of experts whose sizes are not given")
    try:
        cluster = _cluster(row)
        dims = _dimensions(row)
        job = _parallelism(row, dims, cluster.flash_attention)
    except ValueError as error:
        raise UnpredictableError(f"not a number: {error}") from None
    except ConfigError as error:
        raise UnpredictableError(str(error)) from None
    assumed = tuple(name for name in ("recompute", "zero", "microbatch", "precision") if not row[name])
    return PublishedRun(row["id"], row["source"], dims, job, cluster, assumed)


def _whole(text: str) -> int:
    """A whole number, also where it is written with a point."""
    value = _number(text)
    if value != int(value) or value < 0:
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def _cluster(row: dict[str, str]) -> Cluster:
    for chip, sheet in chips().items():
        if any(re.search(name, row["chip"]) for name in sheet["names"]):
            cluster = Cluster.of_chip(chip)
            break
    else:
        raise UnpredictableError(f"chip {row['chip']}: no data sheet is known")
    if row["mem_gb"]:
        cluster = dataclasses.replace(cluster, memory_gb=_number(row["mem_gb"]))
    network = re.search(r"IB (\d+) Gb/s|(\d+) Gbps between nodes", row["note"])  # of a whole node
    per_node = float(network[1] or network[2]) / 8 if network else 0.0
    if row["source"].startswith("bigscience"):
        per_node = JEAN_ZAY_GB_PER_S
    if per_node:
        cluster = dataclasses.replace(cluster, inter_node_gb_per_s=per_node / cluster.devices_per_node)
    return cluster


def _dimensions(row: dict[str, str]) -> Dimensions:
    hidden, gated = _whole(row["hidden"]), bool(GATED.search(row["model"]))
    alike_palm, experts = "PaLM" in row["model"], WITH_EXPERTS.get(row["model"], {})
    if experts:
        capacity = CAPACITY_FACTORS[row["model"]]
        experts = {**experts, "num_experts": _whole(noted(row, "experts")), "expert_rows": capacity}
        experts["expert_layers"] = _whole(row["layers"]) - experts.pop("first_dense")
    return Dimensions(
        num_layers=_whole(row["layers"]),
        hidden_size=hidden,
        num_heads=_whole(row["heads"]),
        num_kv_heads=_whole(noted(row, "kv_heads") or ("1" if alike_palm else "0")),
        vocab_size=_whole(row["vocab"]) if row["vocab"] else ASSUMED_VOCABULARY,
        seq_len=_whole(row["seq"]),
        ffn_hidden_size=_whole(row["ffn"]) if row["ffn"] else _llama_ffn(row, hidden) if gated else 0,
        gated_mlp=gated,
        position_tables=0 if gated else 1,
        tied_embedding=not gated,
        block="parallel" if alike_palm or "parallel transformer block" in row["note"] else "sequential",
        qkv_bias=not gated,
        output_bias=not gated,
        mlp_bias=not gated,
        norm_bias=not gated,
        dropout=not gated,
        **experts,
    )


def _llama_ffn(row: dict[str, str], hidden: int) -> int:
    """LLaMA's rule: two thirds of 4 h, times a factor, rounded up. A large `mult` is the width itself."""
    multiple, factor = _whole(noted(row, "multiple_of") or "256") or 1, _number(noted(row, "mult") or "1")
    return int(factor) if factor > 100 else multiple * math.ceil(int(8 * hidden / 3) * factor / multiple)


def _parallelism(row: dict[str, str], dims: Dimensions, flash: bool) -> Parallelism:
    tp, pp, cp = _whole(row["tp"]), _whole(row["pp"]), _whole(noted(row, "cp") or "1")
    devices, batch = _whole(row["devices"]), _whole(row["global_batch"])
    if min(tp, pp, cp, devices, batch) < 1:
        raise UnpredictableError("a degree, the devices or the batch is zero")
    dp = devices // (tp * pp * cp)  # where cp is used, the column counts its ranks or not
    if dp < 1 or dp * tp * pp * cp != devices:
        raise UnpredictableError("tp x pp x cp does not divide the devices")
    if pp > dims.num_layers:
        raise UnpredictableError("more stages than layers")
    local = _whole(noted(row, "local_batch") or "0") if pp == 1 else 0
    is_titan = bool(TORCHTITAN.search(row["source"]))
    if is_titan and pp > 1 and not row["microbatch"]:
        local = max(1, _whole(noted(row, "local_batch") or "0") // pp)
    microbatch = _whole(row["microbatch"] or str(local or 1)) or 1
    text, zero = row["precision"].lower(), row["zero"]
    precision = "fp8" if "fp8" in text else "fp16" if "fp16" in text else "bf16"
    level = ZERO[zero] if zero in ZERO else _whole(zero)
    word = noted(row, "flash_attn").lower()
    recompute, layers = _recompute(row, pp)
    megatron = bool(MEGATRON.search(row["source"]))
    return Parallelism(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_whole(noted(row, "ep") or "1") if dims.num_experts else 1,
        virtual_stages=_whole(row["vpp"] or "0") or _virtual_stages(row, dims.num_layers, pp),
        microbatch=microbatch,
        num_microbatches=max(1, round(batch / dp / microbatch)),
        recompute=recompute,  # type: ignore[arg-type]
        recomputed_layers=layers,
        repeats_results=zero != "ms-opt-parallel",
        zero=level,
        gathers="step" if zero == "ms-opt-parallel" or (pp > 1 and is_titan) else "microbatch",
        sequence_parallel=megatron or noted(row, "sp").lower() in ("1", "true") or "SP on" in row["note"] or level == 3,
        overlaps_tensor_parallel="AsyncTP" in row["note"] or (megatron and precision == "fp8"),
        gathers_fp8=is_titan and precision == "fp8" and "rowwise" not in text,
        overlaps_sends=megatron and precision == "fp8",
        attention_share=CUDNN_SHARE if megatron and precision == "fp8" else 0.0,
        overlaps_new_weights=megatron,
        hides_gradients=not (AFTER_THE_PASSES.search(row["source"]) or row["id"].startswith("dlperf_meg")),
        reduced_bytes=2 if megatron or precision == "fp16" else 4,
        collectives_of_layer=TENSORS_OF_LAYER if level == 3 and DEEPSPEED_2021.search(row["source"]) else 1,
        scatter_gather=zero in ("0", "dist-opt") or "scatter/gather" in row["note"],  # Megatron's; DeepSpeed sends all
        flash_attention=word == "true" if word in ("true", "false") else flash or (precision == "bf16" and level >= 2),
        precision=precision,  # type: ignore[arg-type]
        **_state_bytes(zero, text),
    )


def _state_bytes(zero: str, precision: str) -> dict[str, Any]:
    """Bytes of gradients and optimizer state that are moved.

    fp16 keeps gradients in 2 bytes, bf16 in 4, and DeepSpeed's bf16 optimizer in both; its fp16 one copies a shard's to
    4 for the update.
    """
    deepspeed = zero in ("1", "2", "3")
    gradients = 2 if precision.startswith("fp16") else 6 if deepspeed and "fp32 grad" in precision else 4
    return {
        "gradient_bytes": gradients,
        "optimizer_bytes": 16 if deepspeed and gradients == 2 else 12,
    }


def _virtual_stages(row: dict[str, str], num_layers: int, pp: int) -> int:
    """Virtual stages where a source only says interleaved: as many, up to 4, as the layers of a stage can be split
    into; 2 where stages are uneven anyway."""
    if pp == 1 or not re.search(r"schedule=interleaved|Interleaved 1F1B", row["note"]):
        return 1
    if num_layers % pp:
        return 2
    return max(parts for parts in (1, 2, 3, 4) if num_layers // pp % parts == 0)


def _recompute(row: dict[str, str], pp: int) -> tuple[str, tuple[int, ...] | None]:
    """Kind of recomputation, and layers of each stage where the note lists them."""
    for kind, key in (("full", "recompute"), ("selective", "select")):
        if (listed := noted(row, key)).startswith("["):
            counts = tuple(int(count) for count in listed.strip("[]").split(",") if count.strip())
            if len(counts) == pp:
                return kind, counts
    kind = row["recompute"].split(" ")[0] or "none"
    if kind not in ("none", "selective", "full"):
        raise UnpredictableError(f"recompute {kind}: unknown")
    return kind, None


def measured(row: dict[str, str], run: PublishedRun) -> Measurement:
    """Measurements in a row.

    Raises:
        UnpredictableError: it contradicts itself.
    """
    if "CONFLICT" in row["note"]:
        raise UnpredictableError("the source contradicts itself")
    failed = "OOM" in row["note"] or "FAILED" in row["note"]
    try:
        memory = _number(noted(row, "measured_mem_gb") or "0") * 2**30 or None
        seconds = _number(row["iter_s"] or noted(row, "derived_iter_s_eq3") or "0") or None
    except ValueError as error:
        raise UnpredictableError(f"not a number: {error}") from None
    if min(memory or 1, seconds or 1) < 0:
        raise UnpredictableError("a measured value is negative")
    tokens = run.job.global_batch_size * run.dims.seq_len
    if seconds and run.dims.model_flops(tokens, causal=True) / run.job.devices / seconds > run.cluster.peak_tflops * (
        2e12 if run.job.precision == "fp8" else 1e12
    ):
        raise UnpredictableError("measured faster than the chip's peak")
    speeds = [*(row[name] for name in PERFORMANCE), *(noted(row, name) for name in SPEEDS)]
    performed = bool(seconds or memory or any(speeds))
    return Measurement(seconds, memory, False if failed else True if performed else None)
