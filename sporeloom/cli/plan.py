# SPDX-License-Identifier: Apache-2.0
"""Find the fastest strategy for a model, a cluster and a batch, with its reasons; without a device and without
MindSpore.

    sporeloom plan --model pangu --size 200b --cluster ascend910a \
        --devices 2048 --global-batch-size 2048 --out plan.yaml
    sporeloom plan --config dims.yaml --cluster h100 --devices 64 --global-batch-size 512
    sporeloom plan list                            built-in strategies, for --strategy NAME
    sporeloom plan validate RUNS.csv --json        how far the cost model is from published runs
    sporeloom plan serve --model pangu --size 13b --cluster ascend910b        devices, latency, throughput of a server

--config takes a model by its dimensions alone: a YAML file with the fields of sporeloom.planner.dimensions.Dimensions.
docs/explanation/planner.md derives every term.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal

from sporeloom.core.command_line import Overwrite, argument, check_numbers, check_subcommand, option, output, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import print_report
from sporeloom.core.numbers import Count
from sporeloom.core.shipped import DECODER, EXPERTS, shipped_names
from sporeloom.models.config_file import NamedModel, is_model_config, model_folder, named_model, with_model_folder
from sporeloom.planner.closed_forms import PRECISIONS, bytes_of_mask
from sporeloom.planner.cluster import read_cluster
from sporeloom.planner.dimensions import Dimensions, of_decoder, read_dimensions
from sporeloom.planner.report import as_dict, command_of, strategy_file, table, validation_report
from sporeloom.planner.search import Devices, PlanRequest, distinct, search, smallest_changes
from sporeloom.planner.task import PLAIN_TEXT, TaskFlags, task_of, task_problems, trained_model
from sporeloom.planner.validate import validate
from sporeloom.strategy.checks import POSSIBLE_SIZES, is_possible_size
from sporeloom.strategy.flags import StateFlags
from sporeloom.strategy.launching import start_lines
from sporeloom.strategy.loader import load_strategy


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Overwrite, StateFlags, TaskFlags):
    common: ClassVar[tuple[str, ...]] = (
        "model",
        "size",
        "config",
        "cluster",
        "devices",
        "global_batch_size",
        "top",
        "out",
        "json",
    )
    model: str | None = option(
        None, "model family, or a model folder, also of Hugging Face (default: none, see --config)"
    )
    size: str | None = option(None, "built-in size of the family (default: none, see --config)")
    config: Path | None = option(
        None, "YAML file with the dimensions of any decoder, instead of --model and --size (default: none)"
    )
    cluster: Path = option(..., "cluster file, or name of a built-in cluster")
    devices: Devices = option(..., "number of devices of the job")
    global_batch_size: Count = option(
        ..., "number of sequences in one step, over all devices; two for each pair of reward and dpo"
    )
    compute_dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16", "number type of matrix products")
    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "optimizer; muon has no second moment of the matrices of layers (the time of its products is not counted)",
    )
    interleave: bool = option(False, "also consider virtual pipeline stages")
    reshard_after_forward: bool = option(
        False, "also consider ZeRO-3 / FSDP: weights are resharded after the forward pass"
    )
    top: Count = option(10, "number of options to show")
    out: Path | None = output(None, "write the fastest option as a strategy file for tools/train.py (default: none)")
    json: bool = option(False, "print JSON instead of the table")


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    runs: Path = argument("CSV file of published runs")
    json: bool = option(False, "print JSON instead of the summary")


def main(argv: Sequence[str]) -> int:
    if list(argv) == ["list"]:
        print(shipped_table())
        return 0
    if argv[:1] == ["validate"]:
        return check_against_runs(parse_args(ValidateConfig, __doc__, argv[1:]))
    if argv[:1] == ["serve"]:
        return import_module("sporeloom.serve.plan_command").main(argv[1:])  # it compiles graphs, with MindSpore
    check_subcommand(argv, ("list", "validate", "serve"))
    config = parse_args(PlanConfig, __doc__, argv, requested)
    request = requested(config)
    if config.out and not config.model:
        raise ConfigError("--out needs --model and --size: a strategy file names rules, which fit our own models")
    if config.out and not is_possible_size(config.devices):
        raise ConfigError(
            f"--out writes what tools/train.py runs, on {POSSIBLE_SIZES} devices, as MindSpore takes no others; got "
            f"--devices {config.devices}"
        )
    options = search(request)
    if not options[0].fits:
        raise ConfigError(smallest_changes(request, options))
    shown = distinct([o for o in options if o.fits])[: config.top]
    if config.out:
        rules = EXPERTS if request.dims.num_experts else DECODER
        write_text_atomically(config.out, strategy_file(request, shown[0], rules, _model_flags(config), config.out))
        print(f"strategy in {config.out}", file=sys.stderr)
    if config.json:
        print(json_text([as_dict(o, shown[0], request.cluster, request.task) for o in shown], indent=1))
    else:
        print_report(table(request, shown))
        if config.out:
            words = [*command_of(request, shown[0], _model_flags(config)), "--data", "DATA"]
            lines = start_lines(words, str(config.out), request.devices, request.cluster.devices_per_node)
            print_report("\n".join(["", *lines]))
    return 0


def _model_flags(config: PlanConfig) -> list[str]:
    """Flags that name the model in the command that runs the plan; other tasks start from a checkpoint."""
    model = ["--model", str(config.model), "--size", str(config.size)]
    if folder := model_folder(str(config.model)):
        family = with_model_folder(NamedModel(str(folder), ""), "").model
        model = ["--from-checkpoint", str(folder), *(["--model", family] if config.task == "pretraining" else [])]
    elif config.task != "pretraining":
        model = ["--from-checkpoint", "CHECKPOINT"]
    adapters = ["--lora-r", str(config.lora_r)] if config.lora_r else []
    narrow = ["--optimizer-state-dtype", "bfloat16"] if config.optimizer_state_dtype == "bfloat16" else []
    return [*model, *adapters, *narrow]


def requested(config: PlanConfig) -> PlanRequest:
    """Build the request from the flags.

    Raises:
        ConfigError: flags that exclude each other, files that are wrong.
    """
    folder = model_folder(config.model) if config.model else None
    has_name = bool(config.model and (folder or config.size))
    if bool(config.config) == has_name or bool(config.model or config.size) != has_name:
        raise ConfigError("give either --model and --size, --model FOLDER, or --config FILE")
    if config.config and config.config.suffix == ".json" and is_model_config(config.config):
        raise ConfigError(f"{config.config}: of a model, not of dimensions alone; give --model {config.config.parent}")
    check_numbers(config)
    if problems := task_problems(config):
        raise ConfigError(problems)
    cluster = read_cluster(config.cluster)
    flash = cluster.flash_attention
    dims: Dimensions
    task = PLAIN_TEXT
    if config.model:
        named = with_model_folder(NamedModel(config.model, config.size or ""), "")
        model = named_model(named.model, named.size, named.config)
        model = trained_model(config, dataclasses.replace(model, compute_dtype=config.compute_dtype))
        task = task_of(config, named.model, model)
        dims, flash = of_decoder(model, has_drops=task.has_drops), flash and model.attention_on_ascend == "flash"
        longest = dims.seq_len
        if config.seq_len and config.seq_len > longest:
            raise ConfigError(f"--seq-len {config.seq_len} is beyond the model's longest context, {longest}")
    else:
        assert config.config
        dims = read_dimensions(config.config)
        if config.task != "pretraining" or config.lora_r:
            raise ConfigError("--task and --lora-r are of our own models: give --model and --size, not --config")
    if config.seq_len is not None:
        dims = dataclasses.replace(dims, seq_len=config.seq_len)
    return PlanRequest(
        dims=dims,
        cluster=cluster,
        devices=config.devices,
        global_batch_size=config.global_batch_size,
        interleave=config.interleave,
        reshard_after_forward=config.reshard_after_forward,
        precision=PRECISIONS[config.compute_dtype],
        flash_attention=flash,
        mask_bytes=bytes_of_mask(flash) if config.model else 0,
        task=dataclasses.replace(task, optimizer_state_dtype=config.optimizer_state_dtype),
        muon=config.optimizer == "muon",
        # The family models recompute nothing else selectively than what FlashAttention does not keep.
        recomputations=("full",) if flash and config.model else ("selective", "full"),
    )


def shipped_table() -> str:
    """The table of built-in strategies, each with its mesh."""
    strategies = {name: load_strategy(name) for name in shipped_names()}
    width = max(map(len, strategies))
    return "\n".join(f"{name:{width}}  {strategy.mesh}" for name, strategy in strategies.items())


def check_against_runs(config: ValidateConfig) -> int:
    report = validate(config.runs)
    print(json_text(report, indent=1) if config.json else validation_report(report))
    return 0
