# SPDX-License-Identifier: Apache-2.0
"""Translate a strategy between this and other projects' formats, and report the translation of every key.

    sporeloom translate run_pangualpha_13b.yaml --to ours --out parallel_configs/mine.yaml
    sporeloom translate parallel_configs/pangu_13b_dp128_tp8.yaml --to mindformers1 --out mine.yaml
    sporeloom translate pretrain.sh --to ours --out mine.yaml --devices 64

    sporeloom translate ds_config.json --to ours --out mine.yaml --devices 64 --seq-len 2048

Reads our strategy files, MindFormers 1.x and 2.x YAML, DeepSpeed's JSON and Megatron-LM's flags (any other file). The
report has for every key: same, renamed, approximated, no effect, not expressible, unknown. docs/how-to/mindformers.md has
the tables.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sporeloom.core.command_line import Overwrite, argument, check_numbers, option, output, parse_args
from sporeloom.core.errors import ConfigError, without_control
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.numbers import Count, Natural, NotNegative, Rate
from sporeloom.core.shipped import DECODER
from sporeloom.dialects import Settings, Translation, translate
from sporeloom.models.config import ComputeDtype
from sporeloom.models.family import size_config
from sporeloom.planner.search import Devices
from sporeloom.strategy.config import SINGLE_DEVICE

FILLS = (
    *("batch_size", "seq_len", "accumulate", "learning_rate", "warmup_steps", "steps", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "weight_decay", "max_grad_norm", "compute_dtype"),
)
"""Flags for settings that a file leaves open."""


@dataclass(frozen=True, kw_only=True)
class TranslateConfig(Overwrite):
    common: ClassVar[tuple[str, ...]] = ("to", "dialect", "out", "config_out", "devices", "rules", "json", "strict")

    input: Path = argument("file to translate")
    to: Literal["ours", "mindformers1", "mindformers2", "megatron"] = option(..., "dialect to write")
    dialect: Literal["ours", "mindformers1", "mindformers2", "megatron", "deepspeed"] | None = option(
        None, "dialect of the input (default: detected)"
    )
    out: Path | None = output(None, "file to write (default: standard output)")
    config_out: Path | None = output(
        None,
        "file to write with the model configuration, where the input describes one: for --config of other "
        "commands (default: none)",
    )
    devices: Devices | None = option(
        None, "number of devices of the job, where the input does not give its data parallel degree (default: none)"
    )
    model: str | None = option(None, "model family, where --num-layers is that of a size (default: none)")
    size: str | None = option(None, "built-in size of the family (default: none)")
    num_layers: Count | None = option(
        None, "number of layers of the model, where stages are counted from it (default: none)"
    )
    batch_size: Count | None = option(
        None, "number of sequences in one step over all devices, where a strategy does not give it (default: none)"
    )
    seq_len: Count | None = option(None, "number of tokens in a sequence (default: none)")
    accumulate: Count | None = option(
        None, "number of gradient accumulation steps, where the input does not give it (default: none)"
    )
    learning_rate: NotNegative | None = option(
        None, 'maximum learning rate, where the input says "auto" (default: none)'
    )
    warmup_steps: Natural | None = option(
        None, 'number of linear warm-up steps, where the input says "auto" (default: none)'
    )
    steps: Count | None = option(
        None, 'number of optimizer steps of the run, where the input says "auto" (default: none)'
    )
    adam_beta1: Rate | None = option(
        None, 'decay rate of the first moment, where the input says "auto" (default: none)'
    )
    adam_beta2: Rate | None = option(
        None, 'decay rate of the second moment, where the input says "auto" (default: none)'
    )
    adam_epsilon: NotNegative | None = option(
        None, 'epsilon, added to the square root of the second moment, where the input says "auto" (default: none)'
    )
    weight_decay: NotNegative | None = option(None, 'weight decay, where the input says "auto" (default: none)')
    max_grad_norm: NotNegative | None = option(
        None, 'maximum global norm of the gradients, where the input says "auto" (default: none)'
    )
    compute_dtype: ComputeDtype | None = option(
        None, 'number type of matrix products, where the input says "auto" (default: none)'
    )
    rules: Path = option(
        Path(DECODER), "rules that a strategy to be written names: a file, or the name of a built-in one"
    )
    json: bool = option(False, "print the report as JSON")
    strict: bool = option(False, "exit code 1 where a key is approximated, not expressible or unknown")


def main(argv: Sequence[str]) -> int:
    config = parse_args(TranslateConfig, __doc__, argv)
    check_numbers(config)
    if config.json and not config.out:
        raise ConfigError("--json needs --out FILE: both would go to stdout")
    done = translate(
        config.input,
        config.to,
        config.rules,
        config.out or Path.cwd() / "strategy.yaml",
        known(config),
        config.devices,
        config.dialect,
        config.config_out,
    )
    if config.config_out:
        write_text_atomically(config.config_out, model_text(done.settings, config.input))
    if config.out:
        write_text_atomically(config.out, done.text)
    else:
        print(done.text, end="")
    print(
        json_text(report(done), indent=1) if config.json else "\n".join(map(without_control, table(done).split("\n"))),
        file=sys.stdout if config.out else sys.stderr,
    )
    return 1 if config.strict and done.losses else 0


def model_text(settings: Settings, source: Path) -> str:
    """Format the configuration of the model as JSON.

    Raises:
        ConfigError: the input describes none.
    """
    if settings.network is None:
        raise ConfigError(f"--config-out: {source} describes no model that is known here")
    family, model = settings.network
    return json_text({"family": family, **model.to_dict()}, indent=2) + "\n"


def known(config: TranslateConfig) -> Settings:
    """Collect what the flags say besides the file."""
    if bool(config.model) != bool(config.size):
        raise ConfigError("give --model and --size together")
    train: dict[str, Any] = {name: value for name in FILLS if (value := getattr(config, name)) is not None}
    num_layers = config.num_layers
    if config.model and config.size:
        train |= {"model": config.model, "size": config.size}
        num_layers = num_layers or size_config(config.model, config.size).num_layers
    return Settings(SINGLE_DEVICE, train, num_layers)


def report(done: Translation) -> dict[str, Any]:
    return {"notes": [asdict(note) for note in done.notes], "losses": len(done.losses)}


def table(done: Translation) -> str:
    lines = [str(note) for note in done.notes]
    counts = {fate: sum(note.fate == fate for note in done.notes) for fate in dict.fromkeys(n.fate for n in done.notes)}
    return "\n".join([*lines, ", ".join(f"{count} {fate}" for fate, count in counts.items())])
