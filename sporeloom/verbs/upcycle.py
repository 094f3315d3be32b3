# SPDX-License-Identifier: Apache-2.0
"""Make a model with experts of a dense one: each expert begins as a copy of the MLP that was there.

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
from typing import Literal

from sporeloom.checkpoint.upcycle import Upcycling, open_dense, upcycled, write_checkpoint, write_model
from sporeloom.cli import Overwrite, check_numbers, option, output, parse_args
from sporeloom.errors import ConfigError
from sporeloom.models.config import ExpertConfig
from sporeloom.models.parameters import num_parameters
from sporeloom.numbers import Count, Natural, NotNegative, Positive, Seed
from sporeloom.outputs import replacing

LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class UpcycleConfig(Overwrite):
    checkpoint: Path = option(..., "dense checkpoint to read")
    out: Path = output(..., "folder to write")
    num_experts: Count = option(..., "experts of a layer")
    experts_per_token: Count = option(2, "experts that a token is given to")
    first_dense_layers: Natural = option(0, "layers at the bottom that keep their MLP")
    layer_frequency: Count = option(1, "of the others every how many-th gets experts")
    router: Literal["softmax", "grouped", "sigmoid", "hash"] = option("softmax", "how experts are chosen")
    num_domains: Count = option(1, "with --router hash: as many groups of experts, for texts of as many domains")
    normalize: Literal["none", "before_drop", "after_drop"] = option(
        "before_drop", "whether the weights of a token's experts are made to add up to 1"
    )
    capacity_factor: Positive | None = option(None, "room of an expert while training; without it nothing is dropped")
    balance_loss: NotNegative = option(0.01, "how much of the balance loss is added to the loss")
    router_z_loss: NotNegative = option(0.001, "how much of the router's z-loss")
    noise: NotNegative = option(0.0, "standard deviation of what is added to each copy")
    seed: Seed = option(0, "of noise and routers")
    carry_optimizer: bool = option(False, "write a training checkpoint, with the optimizer's state")
    verify: bool = option(False, "compare the logits of both models")


def main(argv: Sequence[str]) -> int:
    config = parse_args(UpcycleConfig, __doc__, argv)
    check_numbers(config)
    dense = open_dense(config.checkpoint)
    names = {field.name for field in dataclasses.fields(ExpertConfig)}
    given = {name: value for name, value in dataclasses.asdict(config).items() if name in names}
    if config.router == "hash":
        given |= {"balance_loss": 0.0, "router_z_loss": 0.0}
    job = Upcycling(dense, upcycled(dense, ExpertConfig(**given)), config.noise, config.seed)
    if config.verify and config.noise:
        raise ConfigError("--verify: with --noise the logits of both models differ; leave one out")
    with replacing(config):
        num_bytes = (write_checkpoint if config.carry_optimizer else write_model)(job, config.out)
    print(
        f"{config.out}: {num_parameters(dense.model):,} parameters became {num_parameters(job.model):,}, "
        f"{num_bytes / 1e6:,.1f} MB"
    )
    return _verify(config, job) if config.verify else 0


def _verify(config: UpcycleConfig, job: Upcycling) -> int:
    """Tell how far the logits of both models are apart; 1 if too far."""
    found = import_module("sporeloom.inference.compare").largest_difference(job.dense.folder, config.out)
    told = f"largest difference of the logits of both models: {found:.1e}"
    if found <= LARGEST_DIFFERENCE:
        print(f"{told}, within {LARGEST_DIFFERENCE:g}")
        return 0
    why = (
        "; the weights of a token's experts do not add up to 1: --normalize none" if config.normalize == "none" else ""
    )
    print(f"{told}, more than {LARGEST_DIFFERENCE:g}{why}")
    return 1
