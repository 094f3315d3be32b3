# SPDX-License-Identifier: Apache-2.0
"""Write the model of a training checkpoint, unsharded, for tools/generate.py and other readers of safetensors.

    sporeloom export-checkpoint out/latest/checkpoints model --max-shard-mb 5000

IN is a checkpoint, or a folder of them: then the newest; or a folder of adapters, which are merged into their model. OUT
gets model.safetensors (or several files and model.safetensors.index.json), config.json and the tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sporeloom.checkpoint.contents import check_contents
from sporeloom.checkpoint.manifest import read_manifest
from sporeloom.checkpoint.published_folder import refuse_published
from sporeloom.checkpoint.reshard import export, export_merged, find_checkpoint
from sporeloom.core.command_line import Overwrite, argument, check_numbers, option, output_argument, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Positive
from sporeloom.core.outputs import replacing
from sporeloom.models.adapters import is_adapter_folder


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Overwrite):
    input: Path = argument("checkpoint to read")
    output: Path = output_argument("folder to write")
    ema: bool = option(False, "export the moving averages of the weights, of a run with --ema-decay")
    max_shard_mb: Positive = option(
        5000.0, "maximum size of a file in megabytes; a larger tensor gets a file of its own"
    )


def main(argv: Sequence[str]) -> int:
    config = parse_args(ExportConfig, __doc__, argv)
    check_numbers(config)
    if config.ema and is_adapter_folder(config.input):
        raise ConfigError(f"--ema: {config.input} holds adapters without averages; give a training checkpoint")
    if is_adapter_folder(config.input):
        with replacing(config):
            num_bytes = export_merged(config.input, config.output, int(config.max_shard_mb * 1e6))
        print(f"{config.output}: {num_bytes / 1e6:,.1f} MB of weights, the adapters of {config.input} merged in")
        return 0
    refuse_published(config.input, config.output)
    source = find_checkpoint(config.input)
    check_contents(read_manifest(source), source)
    with replacing(config):
        num_bytes = export(source, config.output, int(config.max_shard_mb * 1e6), config.ema)
    what = "averaged weights" if config.ema else "weights"
    print(f"{config.output}: {num_bytes / 1e6:,.1f} MB of {what} from {source}")
    return 0
