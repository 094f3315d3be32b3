# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint between the published namings and ours.

    mindloom convert-checkpoint --model pangu --from megatron --to ours --size 2.6b weights.npz checkpoint/
    mindloom convert-checkpoint --model pangu --from ours --to mindspore checkpoint/ weights.ckpt
    mindloom convert-checkpoint --from ours --to ours checkpoint/ ranks/ --ranks-of STRATEGY.yaml
    mindloom convert-checkpoint --from ours --to ours ranks/ checkpoint/ --layouts ranks/layouts --size tiny

Ours is a folder (safetensors and config.json); the others are .npz or MindSpore .ckpt files. With --layouts IN is a folder of
MindSpore's files of each rank, rank_0/*.ckpt, ..., put together by MindSpore; with --ranks-of OUT becomes one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from mindloom.checkpoint.io import check_weights, load_config, save_checkpoint
from mindloom.cli import argument, option, parse_args
from mindloom.errors import ConfigError
from mindloom.models.config import ModelConfig
from mindloom.models.family import family_module, size_config
from mindloom.models.parameters import parameter_shapes
from mindloom.models.weight_names import names
from mindloom.reader import Document, fields_from, read_json
from mindloom.runtime.environment import prepare_environment
from mindloom.strategy.checks import model_problems
from mindloom.strategy.config import Strategy
from mindloom.strategy.loader import load_strategy

Dialect = Literal["megatron", "mindspore", "ours"]


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    input: Path = argument("file or folder to read")
    output: Path = argument("file or folder to write")
    model: str = option("pangu", "model family")
    from_: Dialect = option(..., "naming of IN")
    to: Dialect = option(..., "naming of OUT")
    size: str | None = option(None, "published size, for what weights cannot tell: heads, activation, token ids")
    layouts: Path | None = option(
        None,
        "MindSpore's strategy file for IN, a folder of each rank's .ckpt; of a pipeline a folder with one of each stage",
    )
    ranks_of: Path | None = option(
        None, "strategy file: write each rank's .ckpt and MindSpore's layouts, under our names"
    )
    config: Path | None = option(None, "JSON file with such fields: num_heads, activation, eod_id, ...")


def model_config(config: ConvertConfig, dimensions: dict[str, int]) -> ModelConfig:
    """Dimensions from the weights; the rest from --size, --config, or our own config.json."""
    values: dict[str, object] = {}
    if config.from_ == "ours" and not config.layouts:
        values = load_config(config.input)[1].to_dict()
    elif config.size:
        values = size_config(config.model, config.size).to_dict()
    document = read_json(config.config) if config.config else Document(str(config.input), {})
    given = document.mapping
    for name, size in dimensions.items():
        if name in given and given[name] != size:
            raise ConfigError(f"{config.config}: {name} is {given[name]}, but the weights say {size}")
    if values:
        base = fields_from(ModelConfig, Document(str(config.input), {**values, **dimensions}))
        return fields_from(ModelConfig, document, base)
    if "num_heads" not in given:
        raise ConfigError(
            f"{config.input}: weights do not tell the number of heads; give --size, or num_heads in --config"
        )
    document.value = {**given, **dimensions}
    return fields_from(ModelConfig, document)


def main(argv: Sequence[str]) -> int:
    config = parse_args(ConvertConfig, __doc__, argv)
    weights = family_module(config.model, "weights")
    prepare_environment()
    convert = import_module("mindloom.checkpoint.convert")  # loads MindSpore, for .ckpt files
    strategy = _check_output(config)
    tensors = (
        convert.read_rank_files(config.input, config.layouts) if config.layouts else convert.read_tensors(config.input)
    )
    aliases = {**weights.ALIASES.get(config.from_, {}), **({"model.": ""} if config.from_ == "ours" else {})}
    source = convert.rename_aliases(tensors, aliases)
    num_layers = convert.count_layers(source, weights.TABLES[config.from_]) + 1
    ours = convert.to_ours(source, names(weights.TABLES[config.from_], num_layers), str(config.input))
    model = model_config(config, convert.dimensions(ours))
    check_weights(ours, parameter_shapes(model), str(config.input))
    if strategy:
        if problems := model_problems(strategy, model):
            raise ConfigError(problems)
        write = import_module("mindloom.train.rank_files").write_rank_files
        write(config.output, ours, config.model, model, strategy)
    elif config.to == "ours":
        save_checkpoint(config.output, ours, config.model, model)
    else:
        convert.write_tensors(config.output, convert.from_ours(ours, names(weights.TABLES[config.to], num_layers)))
    print(f"{config.output}: {len(ours)} tensors, {sum(value.size for value in ours.values()):,} parameters")
    return 0


def _check_output(config: ConvertConfig) -> Strategy | None:
    """The strategy whose ranks' files are wanted, if any.

    Raises:
        ConfigError: the output cannot be what is asked for.
    """
    if config.ranks_of:
        if config.to != "ours":
            raise ConfigError(f"--ranks-of writes our networks' names; use --to ours, not --to {config.to}")
        if config.output.exists():
            raise ConfigError(f"{config.output}: exists; choose another name")
        return load_strategy(config.ranks_of)
    if config.to != "ours" and config.output.suffix not in (".npz", ".ckpt"):
        raise ConfigError(f"{config.output}: the {config.to} naming is written to a .npz or .ckpt file")
    if config.to == "ours" and config.output.exists() and not (config.output / "config.json").is_file():
        raise ConfigError(f"{config.output}: exists and is no checkpoint folder; choose another name")
    return None
