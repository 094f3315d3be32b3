# SPDX-License-Identifier: Apache-2.0
"""Estimate a server: the devices it needs, their memory, latency and throughput, from the graphs that it would run.

    sporeloom plan serve --model pangu --size 13b --cluster ascend910b
    sporeloom plan serve --model CHECKPOINT --cluster h100 --max-num-seqs 32 --input-len 2048 --output-len 512 --weights int8

Nothing is measured. Where published figures of servers can be compared with what is planned, the estimates have intervals,
and a line says what these rest on; elsewhere it says why there are none.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sporeloom.core.command_line import option, parse_args
from sporeloom.core.errors import Problems
from sporeloom.core.json_text import json_text
from sporeloom.core.log import print_report
from sporeloom.core.numbers import Count, number_problems
from sporeloom.core.shipped import DECODER, EXPERTS
from sporeloom.inference.cache import KV_CACHE_HELP, CacheName
from sporeloom.models.config import ModelConfig
from sporeloom.models.config_file import model_folder, named_model, with_model_folder
from sporeloom.models.weight_formats import WEIGHTS_HELP, WeightName
from sporeloom.planner.cluster import read_cluster
from sporeloom.planner.errors import NoInterval
from sporeloom.serve.config import CHUNK
from sporeloom.serve.plan import ServingLoad, ServingPlan, plan_serving
from sporeloom.serve.plan_errors import FIGURES, ServingIntervals, serving_intervals

GB = 2**30


@dataclass(frozen=True, kw_only=True)
class PlanServeConfig:
    heading: ClassVar[str] = "plan serve"
    common: ClassVar[tuple[str, ...]] = (
        *("model", "size", "cluster", "tp", "max_num_seqs", "input_len", "output_len", "mean_context"),
        *("weights", "kv_cache", "json"),
    )
    model: str = option("pangu", "model family, or a model folder, also of Hugging Face")
    size: str = option("tiny", "built-in size of the family")
    config: Path | None = option(
        None, "JSON file with model configuration fields that replace those of the size (default: none)"
    )
    cluster: Path = option(..., "cluster file, or name of a built-in cluster")
    tp: Count | None = option(None, "number of devices, all tensor parallel (default: the fewest that it fits into)")
    max_num_seqs: Count = option(16, "number of sequences that are computed at the same time")
    input_len: Count = option(1024, "number of tokens of each prompt")
    output_len: Count = option(256, "number of tokens of each answer")
    mean_context: Count | None = option(
        None,
        "mean number of tokens of a sequence that a step reads, for servers that read only those that are there (default: "
        "all slots of the cache, as sporeloom serve does on devices)",
    )
    prefill_chunk: Count = option(CHUNK, "number of prompt tokens prefilled between two decode steps")
    weights: WeightName = option("float32", WEIGHTS_HELP)
    kv_cache: CacheName = option("auto", KV_CACHE_HELP)
    compute_dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16", "number type of matrix products")
    json: bool = option(False, "print JSON instead of the report")


def main(argv: Sequence[str]) -> int:
    given = parse_args(PlanServeConfig, __doc__, argv)
    problems = Problems(number_problems(given))
    cluster = problems.of(read_cluster, given.cluster)
    config = problems.of(with_model_folder, given)
    named = problems.of(named_model, config.model, config.size, config.config) if config else None
    problems.raise_if_any()
    assert cluster and config and named
    model = dataclasses.replace(named, compute_dtype=config.compute_dtype, dropout_rate=0.0)
    load = ServingLoad(
        num_rows=config.max_num_seqs,
        input_len=config.input_len,
        output_len=config.output_len,
        chunk=config.prefill_chunk,
        weights=config.weights,
        kv_cache=config.kv_cache,
        mean_context=config.mean_context,
    )
    plan = plan_serving(config.model, model, cluster, load, config.tp)
    intervals = serving_intervals(model, cluster, load)
    if config.json:
        print(json_text(as_dict(plan, intervals), indent=1))
    else:
        usable = f"{cluster.usable_bytes / GB:.0f} GB of {cluster.chip}"
        checkpoint = str(model_folder(given.model) or "CHECKPOINT")
        lines = [report(plan, f"{config.model} {config.size}", usable, intervals), "", *start(plan, model, checkpoint)]
        print_report("\n".join(lines))
    return 0


def start(plan: ServingPlan, model: ModelConfig, checkpoint: str) -> list[str]:
    """The command that starts the server."""
    load = plan.load
    words = ["serve", checkpoint, "--max-num-seqs", load.num_rows, "--max-model-len", load.input_len + load.output_len]
    words += ["--prefill-chunk", load.chunk] if load.chunk != CHUNK else []
    words += ["--weights", load.weights] if load.weights != "float32" else []
    words += ["--kv-cache", load.kv_cache] if load.kv_cache != "auto" else []
    command = f"  sporeloom {shlex.join(map(str, words))}"
    if plan.tp == 1:
        return ["to run it:", command]
    rules = EXPERTS if model.experts else DECODER
    return [
        f"to run it, where strategy.yaml has `mesh: {{tp: {plan.tp}}}` and `rules: {rules}`:",
        f"{command} --strategy strategy.yaml --launch",
    ]


def as_dict(plan: ServingPlan, intervals: ServingIntervals | NoInterval) -> dict[str, Any]:
    """The plan as data: times in seconds, sizes in bytes of each device."""
    found: dict[str, Any] = {name: getattr(plan, name) for name in ("request_s", "tokens_per_s")}
    bounds = None
    if isinstance(intervals, ServingIntervals):
        bounds = {name: intervals.of(name, getattr(plan, name)) for name in FIGURES}
    return dataclasses.asdict(plan) | found | {"intervals": bounds, "intervals_meaning": intervals.explain()}


def report(plan: ServingPlan, model: str, usable: str, intervals: ServingIntervals | NoInterval) -> str:
    """The plan for a person."""

    def shown_with_bounds(name: str, factor: float, digits: int, unit: str) -> str:
        value = getattr(plan, name)
        found = f"{factor * value:,.{digits}f}{unit}"
        if isinstance(intervals, NoInterval):
            return found
        low, high = (f"{factor * bound:,.{digits}f}" for bound in intervals.of(name, value))
        return f"{found} ({low} to {high})"

    load, rest = plan.load, plan.peak_bytes - plan.weight_bytes - plan.cache_bytes
    parts = sorted(plan.decode_parts.items(), key=lambda part: -part[1])
    chunks = " and ".join(f"{calls} x {length} tokens" for length, calls in load.chunks.items())
    context = "at a full cache" if load.mean_context is None else f"at a mean context of {load.mean_context:,} tokens"
    shown = ", ".join(f"{kind} {seconds * 1e3:.1f}" for kind, seconds in parts if seconds >= 0.05e-3)
    return "\n".join(
        [
            f"{model} on {plan.tp} device{'s' * (plan.tp > 1)} (tensor parallel), weights {load.weights}: "
            f"{load.num_rows} sequences of {load.input_len:,} + {load.output_len:,} tokens",
            "",
            f"memory of a device     {plan.peak_bytes / GB:.1f} of {usable}: weights {plan.weight_bytes / GB:.1f}, "
            f"KV cache {plan.cache_bytes / GB:.1f}, working memory {rest / GB:.1f} GB",
            f"time to first token    {shown_with_bounds('first_token_s', 1e3, 0, ' ms')} on an idle server, its prompt in "
            f"{chunks}",
            f"time per output token  {shown_with_bounds('decode_s', 1e3, 1, ' ms')} in a step of {load.num_rows} sequences "
            f"{context}: "
            f"{shown}",
            f"throughput             {shown_with_bounds('tokens_per_s', 1, 0, '')} output tokens/s, "
            f"{1 / plan.request_s:.2f} requests/s, with prompts prefilled in between",
            "",
            f"Estimated from the server's own graphs. {intervals.explain()[0].upper()}{intervals.explain()[1:]}.",
        ]
    )
