# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference/model_cards.md: what a model is, what training and serving it take, by this package's own plans.

    python benchmarks/model_cards.py                       all cards, in 15 minutes
    python benchmarks/model_cards.py "PanGu-alpha 13B"         some cards; the others stay

Times, memory and strategies are those of `sporeloom plan`; bytes of a server are those of the network that it builds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms

ms.set_device("CPU")

from model_pictures import picture  # noqa: E402
from report import ROOT  # noqa: E402

from sporeloom.cli.plan import PlanConfig, requested  # noqa: E402
from sporeloom.core.errors import ConfigError  # noqa: E402
from sporeloom.inference.model import CACHE, build_model  # noqa: E402
from sporeloom.models.config import ModelConfig  # noqa: E402
from sporeloom.models.family import size_config  # noqa: E402
from sporeloom.models.slots import SLOTS_MULTIPLE, num_slots_for  # noqa: E402
from sporeloom.models.weight_formats import WEIGHT_FORMATS  # noqa: E402
from sporeloom.planner.cluster import Cluster, read_cluster  # noqa: E402
from sporeloom.planner.dimensions import of_decoder  # noqa: E402
from sporeloom.planner.errors import NoInterval, time_interval  # noqa: E402
from sporeloom.planner.parallelism import Parallelism  # noqa: E402
from sporeloom.planner.search import Option, PlanRequest, describe, search  # noqa: E402
from sporeloom.strategy.checks import model_problems  # noqa: E402
from sporeloom.strategy.config import Strategy  # noqa: E402
from sporeloom.strategy.loader import strategy_of  # noqa: E402

GB = 2**30
CLUSTERS = ("ascend910b", "cloudmatrix384", "h100")
SERVERS = ("ascend910b", "h100")
"""Clusters whose devices differ in memory."""
ROWS, SERVED_TOKENS, MAX_TP = 16, 8192, 128
RESERVED_GB = Cluster.reserved_gb
"""Of every device, on all of CLUSTERS."""
CAPACITY_FACTOR = 1.25
"""Of the second plan of models whose experts have no capacity limit."""
ITEMSIZE = {"Float32": 4, "BFloat16": 2, "Float16": 2, "Int8": 1, "UInt8": 1, "Int32": 4}
WEIGHTS = ("float32", "int8")
PICTURES = "docs/images/models"
PAGE = ROOT / "docs/reference/model_cards.md"


@dataclass(frozen=True)
class Card:
    """A model, and the training job that its card plans."""

    title: str
    family: str
    size: str
    devices: int
    batch: int
    seq_len: int
    source: str

    @property
    def config(self) -> ModelConfig:
        return size_config(self.family, self.size)

    @property
    def path(self) -> str:
        """Of the picture, from the root."""
        return f"{PICTURES}/{self.family}_{self.size}.svg"


ALPHA = "arXiv:2104.12369"
TWO = (
    "published `config.json` values and configuration class. They do not say which layers have sparse attention or norm "
    "their streams; here it is every third and every fifth one, as many as published"
)
CARDS = (
    Card("PanGu-alpha 2.6B", "pangu", "2.6b", 64, 512, 1024, ALPHA),
    Card("PanGu-alpha 13B", "pangu", "13b", 128, 1024, 1024, ALPHA),
    Card("PanGu-alpha 200B", "pangu", "200b", 2048, 2048, 1024, ALPHA),
    Card(
        "openPangu-Embedded 7B",
        "pangu",
        "embedded_7b",
        64,
        512,
        4096,
        "`config.json` and `modular_openpangu_dense.py` of its release",
    ),
    Card(
        "Pangu Pro MoE 72B",
        "pangu",
        "pro_moe_72b",
        512,
        1024,
        4096,
        "`config.json` of its release, arXiv:2505.21411",
    ),
    Card("Pangu Ultra 135B", "pangu", "ultra_135b", 1024, 1024, 4096, "arXiv:2504.07866, sections 2.2 and 2.3"),
    Card(
        "Pangu Ultra MoE 718B",
        "pangu",
        "ultra_moe_718b",
        2048,
        2048,
        4096,
        "arXiv:2505.04519 and the configuration of its release",
    ),
    Card("openPangu 2.0 Flash", "pangu", "2_flash", 128, 512, 4096, TWO),
    Card("openPangu 2.0 Pro", "pangu", "2_pro", 512, 512, 4096, TWO),
    Card("CodeGeeX 13B", "codegeex", "13b", 128, 1024, 2048, "THUDM/CodeGeeX, `codegeex/mindspore/configs/13B.sh`"),
    Card("CodeGeeX2 6B", "codegeex", "2_6b", 64, 512, 4096, "`config.json` of THUDM/codegeex2-6b"),
    Card("CodeGeeX4 9B", "codegeex", "4_9b", 64, 512, 4096, "`config.json` of THUDM/codegeex4-all-9b"),
    Card("PaLM 540B", "palm", "540b", 2048, 2048, 2048, "arXiv:2204.02311, sections 2 and 5, table 1"),
)
HEAD = f"""# Model cards

```sh
sporeloom plan --model pangu --size 13b --cluster ascend910b --devices 128 --global-batch-size 1024 --seq-len 1024
```

Each card has a model's architecture, and what training and serving take by this package's own
plans. No figure is a measurement. `python benchmarks/model_cards.py` writes the page;
[Models](models.md) has all sizes, [Accuracy of plans](../explanation/planner.md) the errors of plans.

**Training** is pretraining in bfloat16 with AdamW: the fastest strategy of `sporeloom plan` with the
card's numbers, as above. The interval is that of measured step times around the predicted one
([intervals](#intervals)). Without a `capacity_factor`, experts on GPUs have capacity for all tokens
and compute E / k rows for each that they get
([Dropless experts](../how-to/experts.md#dropless-experts)): where that is more than twice the rows,
the card plans the model a second time with `capacity_factor` {CAPACITY_FACTOR}.

**Serving** is the memory of weights and KV cache on each device, for {ROWS} sequences of {SERVED_TOKENS:,} tokens
(or the model's context, where that is shorter), computed and cached in bfloat16, on the fewest
tensor parallel devices, a power of two up to {MAX_TP}, whose memory they fit into. A sequence has a
multiple of {SLOTS_MULTIPLE} slots of the cache, at least one more than its tokens; the figures are of all slots.
`serve` holds weights as float32 or int8 (`--weights`); it has no bfloat16 weights. Layers of
multi-token prediction are among the weights. Working memory is not counted.

GB are 2^30 bytes. Devices have 64 GB (`ascend910b`: an Ascend 910B; `cloudmatrix384`: a die of an
Ascend 910C) or 80 GB (`h100`); training and serving use {RESERVED_GB:g} GB less, which are reserved for the
framework and its collectives. See [Describe a cluster](../how-to/plan.md#describe-a-cluster). No
published run used a 910C: its times have the 910B's efficiencies and no interval.
"""


def plan_request(card: Card, cluster: str, capacity_factor: float | None = None) -> PlanRequest:
    """The request as `sporeloom plan` makes it from the card's numbers."""
    common: dict[str, Any] = {
        "cluster": Path(cluster),
        "devices": card.devices,
        "global_batch_size": card.batch,
        "seq_len": card.seq_len,
    }
    if capacity_factor is None:
        return requested(PlanConfig(model=card.family, size=card.size, **common))
    with tempfile.TemporaryDirectory() as folder:
        experts = dataclasses.replace(card.config.mixture, capacity_factor=capacity_factor)
        values = dataclasses.replace(card.config, experts=experts).to_dict()
        Path(folder, "config.json").write_text(json.dumps({"family": card.family, **values}), encoding="utf-8")
        return requested(PlanConfig(model=folder, **common))


def fastest(request: PlanRequest) -> Option:
    """The fastest option that fits.

    Raises:
        ConfigError: nothing fits.
    """
    options = search(request)
    if not options[0].fits:
        needed = f"{options[0].peak_bytes / GB:.1f} GB of {request.cluster.usable_bytes / GB:.1f}"
        raise ConfigError(f"nothing fits: the nearest strategy needs {needed}")
    return options[0]


def training_row(card: Card, cluster: str, capacity_factor: float | None = None) -> tuple[str, ...]:
    """Cells of a plan: cluster, step, interval, tokens/s, MFU, memory, strategy."""
    name = cluster if capacity_factor is None else f"{cluster}, `capacity_factor` {capacity_factor}"
    try:
        request = plan_request(card, cluster, capacity_factor)
        option = fastest(request)
    except ConfigError as error:
        return name, "-", "-", "-", "-", "-", error.problems[0]
    interval = time_interval(request.dims, option.job, request.cluster, request.task)
    if isinstance(interval, NoInterval):
        low_high = f"none: {interval.why}"
    else:
        low_high = "{:.3g} to {:.3g} s".format(*interval.of(option.seconds))
    memory = f"{option.peak_bytes / GB:.1f} GB"
    figures = (f"{option.seconds:.3f} s", low_high, f"{option.tokens_per_s:,.0f}", f"{option.mfu:.1%}", memory)
    return name, *figures, describe(option.job)


def training(card: Card) -> str:
    rows = [training_row(card, cluster) for cluster in CLUSTERS]
    if card.config.experts and of_decoder(card.config).dropless:
        rows += [training_row(card, cluster, CAPACITY_FACTOR) for cluster in CLUSTERS]
    heads = ("cluster", "step", "interval", "tokens/s", "MFU", "memory", "strategy")
    said = f"Training on {card.devices} devices, {card.batch} sequences of {card.seq_len} tokens a step:"
    return f"{said}\n\n{table(heads, rows)}"


class Served(NamedTuple):
    """Bytes on each device of a server."""

    weights: int
    cache: int


def served_tokens(config: ModelConfig) -> int:
    return min(SERVED_TOKENS, config.seq_len)


def strategy_with(config: ModelConfig, tp: int) -> Strategy:
    return strategy_of({"mesh": {"tp": tp}, "rules": "experts" if config.experts else "decoder"}, "model_cards")


@functools.cache
def served(family: str, size: str, tp: int, weights: str) -> Served:
    """What the network of a server holds on each of `tp` devices."""
    config = dataclasses.replace(size_config(family, size), compute_dtype="bfloat16", dropout_rate=0.0)
    shape, held = (ROWS, num_slots_for(served_tokens(config))), WEIGHT_FORMATS[weights]
    net = build_model(family, config, strategy_with(config, tp), shape, held)
    of_weights = cache = 0
    for parameter in net.get_parameters():
        local = math.prod(net.parallel_report.of(parameter.name).local_shape) * ITEMSIZE[str(parameter.dtype)]
        cache += local if CACHE in parameter.name else 0
        of_weights += 0 if CACHE in parameter.name else local
    return Served(of_weights, cache)


def possible_devices(config: ModelConfig) -> tuple[list[int], str]:
    """Tensor parallel degrees, powers of two up to MAX_TP, and why a server has no larger one."""
    degrees = list[int]()
    for tp in (2**power for power in range(MAX_TP.bit_length())):
        if problems := model_problems(strategy_with(config, tp), config):
            return degrees, problems[0].partition(": ")[2].partition(";")[0]
        degrees.append(tp)
    return degrees, ""


def fewest_devices(card: Card, usable: float, weights: str) -> tuple[int, Served] | str:
    """The smallest tensor parallel degree at which a server fits, or why none does."""
    least = of_decoder(card.config).num_parameters * WEIGHT_FORMATS[weights].bits / 8
    degrees, larger = possible_devices(card.config)
    for tp in degrees:
        if least / tp <= usable and sum(found := served(card.family, card.size, tp, weights)) <= usable:
            return tp, found
    needed = sum(served(card.family, card.size, degrees[-1], weights)) / GB
    return f"none: {needed:.0f} GB on each of {degrees[-1]}" + (f"; {larger}" if larger else "")


def serving_row(card: Card, cluster: str, weights: str) -> tuple[str, ...]:
    """Cells of a server: device, weights, number of devices, GB of weights and of the cache on each."""
    of = read_cluster(Path(cluster))
    found, device = fewest_devices(card, of.usable_bytes, weights), f"{of.memory_gb} GB"
    if isinstance(found, str):
        return device, weights, found, "-", "-"
    tp, held = found
    return device, weights, str(tp), f"{held.weights / GB:.2f} GB", f"{held.cache / GB:.2f} GB"


def served_line(card: Card) -> str:
    tokens = served_tokens(card.config)
    return f"Serving {ROWS} sequences of {tokens:,} tokens, in {num_slots_for(tokens):,} slots of the cache each:"


def serving(card: Card) -> str:
    rows = [serving_row(card, cluster, weights) for cluster in SERVERS for weights in WEIGHTS]
    heads = ("device", "weights", "number of devices", "weights of each", "KV cache of each")
    return f"{served_line(card)}\n\n{table(heads, rows)}"


def facts(card: Card) -> str:
    """Parameters, context and source."""
    config, dims = card.config, of_decoder(card.config)
    main = dataclasses.replace(dims, mtp_entries=0, mtp_layers=0)
    active = f", {main.active_parameters:,} of them active for a token" if config.experts else ""
    further = f"; multi-token prediction has {dims.mtp_entries:,} more" if dims.mtp_entries else ""
    lines = [
        f"- `--model {card.family} --size {card.size}`",
        f"- Parameters: {main.num_parameters:,}{active}{further}",
        f"- Context: {config.seq_len:,} tokens",
        f"- Source of the configuration: {card.source}",
    ]
    return "\n".join(lines)


def intervals() -> str:
    """What the planner says of its intervals, for each kind of model and cluster."""
    cards = {bool(card.config.experts): card for card in reversed(CARDS)}
    lines = []
    for has_experts, card in sorted(cards.items()):
        for cluster in CLUSTERS:
            request = plan_request(card, cluster)
            job = Parallelism(precision=request.precision, own_graphs=True)
            said = time_interval(request.dims, job, request.cluster, request.task).explain()
            lines.append(f"- {'With experts' if has_experts else 'Dense'}, {cluster}: {said}.")
    return "## Intervals\n\n" + "\n".join(lines) + "\n"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ("---",) * len(heads), *rows))


def card_text(card: Card) -> str:
    image = f"![Architecture of {card.title}](../{card.path.removeprefix('docs/')})"
    return f"## {card.title}\n\n{image}\n\n{facts(card)}\n\n{training(card)}\n{serving(card)}"


def written() -> dict[str, str]:
    """Sections of the page as it is, by title."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return {part.partition("\n")[0]: f"## {part}" for part in re.split(r"(?m)^## ", text)[1:]}


def main(titles: list[str]) -> None:
    for card in CARDS:
        path = ROOT / card.path
        path.parent.mkdir(exist_ok=True)
        path.write_text(picture(card.config, f"Architecture of {card.title}"), encoding="utf-8")
        if not titles or card.title in titles:
            text = card_text(card) + "\n"
            sections = {**written(), card.title: text}
            known = [sections[other.title] for other in CARDS if other.title in sections]
            PAGE.write_text("".join([HEAD, "\n", contents(), "\n", *known, intervals()]), encoding="utf-8")


def contents() -> str:
    """Links to the cards."""
    lines = ["## Contents", ""]
    for title in (*(card.title for card in CARDS), "Intervals"):
        anchor = "".join(c for c in title.lower().replace(" ", "-") if (c.isascii() and c.isalnum()) or c in "-_")
        lines.append(f"- [{title}](#{anchor})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
