# SPDX-License-Identifier: Apache-2.0
"""Memory and time of serving a model, from the graphs that a server runs: a chunk of a prompt, a token of each sequence."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sporeloom.core.errors import ConfigError
from sporeloom.core.shipped import DECODER, EXPERTS
from sporeloom.dry_run.memory.run import pool_bytes
from sporeloom.dry_run.partitioned import Partitioned, begin, partition_forward
from sporeloom.dry_run.time.run import step_times
from sporeloom.dry_run.time.simulate import RankTime
from sporeloom.inference.cache import CacheName, cache_problems
from sporeloom.inference.decoding import bucket
from sporeloom.inference.model import CACHE, build_model
from sporeloom.models.config import ModelConfig
from sporeloom.models.slots import num_slots_for
from sporeloom.models.weight_formats import WEIGHT_FORMATS, WeightName, format_problems
from sporeloom.planner.cluster import Cluster
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import strategy_of

MAX_TP = 128


@dataclass(frozen=True, kw_only=True)
class ServingLoad:
    """Sequences that a server computes at the same time, and the requests that they are."""

    num_rows: int
    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """Tokens of each answer."""
    chunk: int
    """Tokens of a prompt that are prefilled between two decode steps."""
    weights: WeightName = "float32"
    kv_cache: CacheName = "auto"
    mean_context: int | None = None
    """Mean number of tokens of a sequence that attention reads, where only those that are there are read; None: all slots of
    its cache, which the graphs of `sporeloom serve` read on devices. Memory is that of whole caches in both cases."""

    @property
    def max_context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.input_len + self.output_len

    @property
    def chunks(self) -> dict[int, int]:
        """Lengths of the graphs that compute a prompt, as those of `CachedDecoder` -> number of their calls."""
        whole, rest = divmod(self.input_len, self.chunk)
        found = Counter({self.chunk: whole}) if whole else Counter[int]()
        if rest:
            found[bucket(rest, self.chunk)] += 1
        return found


@dataclass(frozen=True)
class ServingPlan:
    """An estimate of a server on `tp` devices. Bytes are of each device, seconds of the program's graphs on it."""

    load: ServingLoad
    tp: int
    weight_bytes: int
    cache_bytes: int
    peak_bytes: int
    """Peak of the memory pool, in the larger of both graphs."""
    first_token_s: float
    """Time to the first token of a prompt on an idle server: all its chunks."""
    decode_s: float
    """Time of a decode step: one token of each sequence."""
    decode_parts: dict[str, float]
    """Seconds of a decode step by kind of kernel, and by collective what is not hidden."""

    @property
    def request_s(self) -> float:
        """Seconds of the devices that a request takes while all rows are busy."""
        return self.first_token_s + (self.load.output_len - 1) * self.decode_s / self.load.num_rows

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second while all rows are busy; prompts take their part of the time."""
        return self.load.output_len / self.request_s


def plan_serving(family: str, model: ModelConfig, cluster: Cluster, load: ServingLoad, tp: int | None) -> ServingPlan:
    """Estimate a server with tensor parallelism over `tp` devices; None: over the fewest that it fits into, a power of two.

    Raises:
        ConfigError: the model cannot be served so, or does not fit.
    """
    if problems := [*load_problems(load, model), *cache_problems(load.kv_cache, model)]:
        raise ConfigError(problems)
    begin()
    for devices in _possible(model, load) if tp is None else [tp]:
        strategy = _strategy(model, devices)
        if problems := _problems(strategy, model, load):
            raise ConfigError(problems)
        depths = reduced_depths(model.without_mtp())
        servers = [_Server(family, depth, strategy, load) for depth in depths]
        more = model.num_layers - depths[0].num_layers
        needed = sum(_extended([server.held_bytes for server in servers], more))
        if needed <= cluster.usable_bytes:
            plan: ServingPlan = _extended([server.plan(cluster) for server in servers], more)
            if (needed := plan.peak_bytes) <= cluster.usable_bytes:
                return plan
    raise ConfigError(
        f"{cluster.chip}: a device has {cluster.usable_bytes / 2**30:.1f} GB to use, and the server needs "
        f"{needed / 2**30:.1f} GB on each of {devices}; give fewer --max-num-seqs, a shorter --input-len or --output-len, "
        "smaller --weights or --kv-cache" + ("" if tp is None else ", or a larger --tp")
    )


def load_problems(load: ServingLoad, model: ModelConfig) -> list[str]:
    """List what is wrong with a load."""
    problems, longest = [], load.max_context
    if longest > model.seq_len:
        problems.append(
            f"--input-len + --output-len = {longest} tokens are more than {model.seq_len}, the model's longest context"
        )
    if load.mean_context is not None and not load.input_len <= load.mean_context <= longest:
        problems.append(
            f"--mean-context {load.mean_context}: while an answer is generated, a sequence has {load.input_len} to {longest} "
            f"tokens, by --input-len and --output-len; {load.input_len + load.output_len // 2} on average"
        )
    return problems


def _strategy(model: ModelConfig, tp: int) -> Strategy:
    return strategy_of({"mesh": {"tp": tp}, "rules": EXPERTS if model.experts else DECODER}, f"--tp {tp}")


def _problems(strategy: Strategy, model: ModelConfig, load: ServingLoad) -> list[str]:
    misfits = format_problems(WEIGHT_FORMATS[load.weights], model, strategy.mesh.tp)
    return [*model_problems(strategy, model), *(f"--weights {load.weights}: {problem}" for problem in misfits)]


def _possible(model: ModelConfig, load: ServingLoad) -> Iterator[int]:
    """Tensor parallel degrees that the model has, at least 1, which the caller finds the problems of."""
    for tp in (2**power for power in range(MAX_TP.bit_length())):
        if tp > 1 and _problems(_strategy(model, tp), model, load):
            return
        yield tp


def reduced_depths(model: ModelConfig) -> list[ModelConfig]:
    """The model, or where its layers are alike from some layer on, with two of these and with one more: each adds the same
    graph, weights and cache. A top query layer remains the last one. Models with experts remain as they are: the peak of
    their memory is not linear in their layers."""
    if model.experts:
        return [model]
    kinds = [_kind(model, layer) for layer in range(model.num_layers - model.query_layer)]
    alike = len(list(itertools.takewhile(lambda kind: kind == kinds[-1], reversed(kinds))))
    base = model.num_layers - alike + 2
    if base + 1 >= model.num_layers:
        return [model]
    return [model.with_layers(base), model.with_layers(base + 1)]


def _kind(model: ModelConfig, layer: int) -> tuple[Any, ...]:
    """Properties that a layer's graph depends on."""
    window = model.windows[layer] if model.windows else None
    has_norm = model.streams is not None and layer in model.streams.norm_layers
    return window, model.has_indexer(layer), has_norm


def _extended(found: Sequence[Any], more: int) -> Any:
    """Extend a figure of few layers, the first of `found`, by `more` layers; the second is that with one more layer, unless
    there are all already. Figures are numbers, or contain numbers."""
    first, *others = found
    if not others:
        return first
    (second,) = others
    if isinstance(first, ServingPlan):
        names = [field.name for field in dataclasses.fields(first) if field.name not in ("load", "tp")]
        changes = {name: _extended([getattr(each, name) for each in found], more) for name in names}
        return dataclasses.replace(first, **changes)
    if isinstance(first, dict):
        return {name: _extended([first.get(name, 0), second.get(name, 0)], more) for name in {**first, **second}}
    if isinstance(first, tuple):
        return tuple(_extended(pair, more) for pair in zip(first, second, strict=True))
    return first + more * (second - first)


class _Server:
    """A server's network, its weights not materialised, with caches of `num_tokens` for each sequence (None: all of it)."""

    def __init__(
        self, family: str, model: ModelConfig, strategy: Strategy, load: ServingLoad, num_tokens: int | None = None
    ):
        self.family, self.model, self.strategy, self.load = family, model, strategy, load
        shape = (load.num_rows, num_slots_for(num_tokens or load.max_context))
        weights = WEIGHT_FORMATS[load.weights]
        self.net = build_model(
            family, model, strategy, shape, weights, kv_cache=load.kv_cache, takes_kernels=False, narrows=True
        )  # also of one device the graph is that of devices

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of the weights and of the KV cache on each device."""
        weights = cache = 0
        for parameter in self.net.get_parameters():
            local = math.prod(self.net.parallel_report.of(parameter.name).local_shape) * parameter.itemsize
            cache += local if CACHE in parameter.name else 0
            weights += 0 if CACHE in parameter.name else local
        return weights, cache

    def plan(self, cluster: Cluster) -> ServingPlan:
        load, timed = self.load, self
        if load.mean_context is not None:
            timed = _Server(self.family, self.model, self.strategy, load, load.mean_context)
        decode, peak = self._step(cluster, timed, load.num_rows, 1)
        first_token_s = 0.0
        for length, calls in load.chunks.items():
            chunk, chunk_peak = self._step(cluster, timed, 1, length)
            first_token_s, peak = first_token_s + calls * chunk.end, max(peak, chunk_peak)
        parts = {**decode.busy(), **decode.exposed()}
        return ServingPlan(load, self.strategy.mesh.tp, *self.held_bytes, peak, first_token_s, decode.end, parts)

    def _step(self, cluster: Cluster, timed: _Server, rows: int, length: int) -> tuple[RankTime, int]:
        """Time that `timed` takes for `length` tokens of each of some rows, and the peak of this server's memory pool."""
        partitioned = self._partitioned(rows, length)
        peak = pool_bytes(partitioned, 0)
        if timed is not self:
            partitioned = timed._partitioned(rows, length)
        return step_times(partitioned, cluster)[0], peak

    def _partitioned(self, rows: int, length: int) -> Partitioned:
        ids, slots = ((rows, length), np.int32), ((rows, self.model.kv_heads, length, 3), np.int32)
        return partition_forward(self.net, self.strategy, [ids, ids, ((rows,), np.int32), slots])
