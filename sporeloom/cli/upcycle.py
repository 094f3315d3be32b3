# SPDX-License-Identifier: Apache-2.0
"""Convert a dense model to mixture of experts (sparse upcycling): each expert starts as a copy of the layer's MLP.

    sporeloom upcycle --checkpoint out/latest/checkpoint --num-experts 8 --experts-per-token 2 --out moe --verify
    sporeloom train --data data.txt --from-checkpoint moe

The checkpoint is a model folder, or a training checkpoint or a folder of them: then the newest. What is written is a model
folder; with --carry-optimizer, a training checkpoint, in which an expert has the optimizer's state of its MLP, too.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal

from sporeloom.checkpoint.upcycle import UpcycleJob, open_dense, upcycled, write_checkpoint, write_model
from sporeloom.core.command_line import Overwrite, check_numbers, option, output, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, Seed
from sporeloom.core.outputs import replacing
from sporeloom.models.parameters import num_parameters
from sporeloom.models.parts.experts import ExpertConfig

MAX_DIFFERENCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class UpcycleConfig(Overwrite):
    common: ClassVar[tuple[str, ...]] = (
        "checkpoint",
        "out",
        "overwrite",
        "num_experts",
        "experts_per_token",
        "first_dense_layers",
        "router",
        "capacity_factor",
        "carry_optimizer",
        "verify",
    )

    checkpoint: Path = option(..., "dense checkpoint to read")
    out: Path = output(..., "folder to write")
    num_experts: Count = option(..., "number of experts in a layer")
    experts_per_token: Count = option(2, "number of experts that process each token")
    first_dense_layers: Natural = option(0, "number of first layers that keep their MLP")
    layer_frequency: Count = option(1, "interval of the layers with experts among the others")
    router: Literal["softmax", "grouped", "sigmoid", "hash"] = option(
        "softmax", "router, which chooses the experts of a token"
    )
    num_domains: Count = option(1, "with --router hash: number of expert groups, one for each domain of texts")
    normalize: Literal["none", "before_drop", "after_drop"] = option(
        "before_drop", "normalization of the combine weights of a token's experts to the sum 1"
    )
    capacity_factor: Positive | None = option(
        None, "capacity factor of an expert in training (default: unlimited, no token is dropped)"
    )
    balance_loss: NotNegative = option(0.01, "coefficient of the load-balancing loss")
    router_z_loss: NotNegative = option(0.001, "coefficient of the router z-loss")
    noise: NotNegative = option(0.0, "standard deviation of the noise that is added to each copy")
    seed: Seed = option(0, "random seed of the noise and the routers")
    carry_optimizer: bool = option(False, "write a training checkpoint, with the optimizer state")
    verify: bool = option(False, "compare the logits of both models")


def main(argv: Sequence[str]) -> int:
    config = parse_args(UpcycleConfig, __doc__, argv)
    check_numbers(config)
    dense = open_dense(config.checkpoint)
    names = {field.name for field in dataclasses.fields(ExpertConfig)}
    given = {name: value for name, value in dataclasses.asdict(config).items() if name in names}
    if config.router == "hash":
        given |= {"balance_loss": 0.0, "router_z_loss": 0.0}
    job = UpcycleJob(dense, upcycled(dense, ExpertConfig(**given)), config.noise, config.seed)
    if config.verify and config.noise:
        raise ConfigError("--verify: with --noise the logits of both models differ; leave one out")
    with replacing(config):
        num_bytes = (write_checkpoint if config.carry_optimizer else write_model)(job, config.out)
    print(
        f"{config.out}: {num_parameters(dense.model):,} parameters became {num_parameters(job.model):,}, "
        f"{num_bytes / 1e6:,.1f} MB"
    )
    return _verify(config, job) if config.verify else 0


def _verify(config: UpcycleConfig, job: UpcycleJob) -> int:
    """Report how much the logits of both models differ; return 1 if too much."""
    found = import_module("sporeloom.inference.compare").largest_difference(job.dense.folder, config.out)
    told = f"largest difference of the logits of both models: {found:.1e}"
    if found <= MAX_DIFFERENCE:
        print(f"{told}, within {MAX_DIFFERENCE:g}")
        return 0
    why = (
        "; the combine weights of a token's experts do not sum to 1: --normalize none"
        if config.normalize == "none"
        else ""
    )
    print(f"{told}, more than {MAX_DIFFERENCE:g}{why}")
    return 1
