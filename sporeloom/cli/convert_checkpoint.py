# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint between published formats and checkpoint folders (`ours`).

    sporeloom convert-checkpoint --from huggingface openPangu-Embedded-7B-V1.1 checkpoint/
    sporeloom convert-checkpoint --from huggingface openPangu-Embedded-7B-V1.1 sharded/ --strategy pangu_embedded_7b_tp8
    sporeloom convert-checkpoint --from ours --to huggingface checkpoint/ published/ --dtype bfloat16
    sporeloom convert-checkpoint --model pangu --from megatron --to ours --size 2.6b weights.npz checkpoint/
    sporeloom convert-checkpoint --model pangu --from ours --to mindspore checkpoint/ weights.ckpt
    sporeloom convert-checkpoint --from ours --to ours checkpoint/ ranks/ --ranks-of STRATEGY.yaml
    sporeloom convert-checkpoint --from ours --to ours ranks/ checkpoint/ --layouts ranks/layouts --size tiny

A checkpoint folder has safetensors and config.json, as Hugging Face's; it is converted some rows at a time. The others are
.npz or MindSpore .ckpt files. With --layouts IN is a folder of MindSpore's files of each rank, rank_0/*.ckpt, ..., put
together by MindSpore; with --ranks-of OUT becomes one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sporeloom.checkpoint.destinations import destinations
from sporeloom.checkpoint.huggingface import (
    Dtype,
    export_published,
    import_published,
    import_shards,
    read_published,
)
from sporeloom.checkpoint.model_folder import check_weights, load_config, save_checkpoint
from sporeloom.checkpoint.published_folder import PublishedFolder, open_published
from sporeloom.core.command_line import Overwrite, argument, option, output_argument, parse_args
from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import counted
from sporeloom.core.numbers import as_flag
from sporeloom.core.outputs import replacing
from sporeloom.core.reader import fields_from, read_json
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module, size_config
from sporeloom.models.parameters import num_parameters, parameter_shapes
from sporeloom.models.weight_names import names
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import load_strategy

DEFAULT_FAMILY = "pangu"
Dialect = Literal["megatron", "mindspore", "huggingface", "ours"]


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Overwrite):
    input: Path = argument("file or folder to read")
    output: Path = output_argument("file or folder to write")
    model: str | None = option(None, "model family (default: from IN's config.json, else pangu)")
    from_: Dialect = option(..., "format of IN")
    to: Dialect = option("ours", "format of OUT")
    model_type: str | None = option(
        None, "with --to huggingface: model_type in config.json (default: one that transformers opens)"
    )
    dtype: Dtype = option("float32", "number type of the weights in OUT, to or from huggingface")
    size: str | None = option(
        None, "built-in size, for what weights do not determine: heads, activation, token ids (default: none)"
    )
    layouts: Path | None = option(
        None,
        "MindSpore's strategy file for IN, a folder of each rank's .ckpt; for a pipeline, a folder with one "
        "file for each stage (default: none)",
    )
    strategy: Path | None = option(
        None,
        "from huggingface: strategy file, or name of a built-in strategy; OUT becomes a training checkpoint "
        "sharded for its ranks (default: a model folder)",
    )
    ranks_of: Path | None = option(
        None,
        "strategy file: write each rank's .ckpt and MindSpore's layouts, with parameter names of this "
        "package (default: one file)",
    )
    config: Path | None = option(
        None,
        "JSON file of the model configuration fields that weights do not determine: num_heads, "
        "activation, eod_id, ... (default: none)",
    )


def model_config(config: ConvertConfig, dimensions: dict[str, int]) -> ModelConfig:
    """Determine the configuration: dimensions from the weights, the rest from --size, --config, or a config.json."""
    values: dict[str, object] = {}
    if config.from_ == "ours" and not config.layouts:
        values = load_config(config.input)[1].to_dict()
    elif config.size:
        values = size_config(config.model or DEFAULT_FAMILY, config.size).to_dict()
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
            f"{config.input}: weights do not determine the number of heads; give --size, or num_heads in --config"
        )
    document.value = {**given, **dimensions}
    return fields_from(ModelConfig, document)


def main(argv: Sequence[str]) -> int:
    config = parse_args(ConvertConfig, __doc__, argv)
    _check_flags(config)
    strategy = _check_output(config)
    with replacing(config):
        return convert(config, strategy)


def convert(config: ConvertConfig, strategy: Strategy | None) -> int:
    """Write the output. `strategy`: the one whose ranks' files --ranks-of writes, if any."""
    if config.to == "huggingface":
        model_type, num_bytes = export_published(
            config.input, config.output, config.model, config.model_type, config.dtype
        )
        print(f"{config.output}: {num_bytes / 1e6:,.1f} MB of weights as {model_type}")
        return 0
    if config.from_ == "huggingface" and not strategy:
        source = open_published(config.input, config.model)
        if config.strategy:
            return _import_shards(config, source)
        num_bytes = import_published(source, config.output, config.dtype)
        print(
            f"{config.output}: {num_parameters(source.model):,} parameters of {source.family}, {num_bytes / 1e6:,.1f} MB"
        )
        return 0
    family, ours, model = _read(config)
    if strategy:
        if problems := model_problems(strategy, model):
            raise ConfigError(problems)
        prepare_environment()
        import_module("sporeloom.train.rank_files").write_rank_files(config.output, ours, family, model, strategy)
    elif config.to == "ours":
        save_checkpoint(config.output, ours, family, model)
    else:
        files = import_module("sporeloom.checkpoint.convert")
        table = names(family_module(family, "weights").TABLES[config.to], model.num_layers)
        if table.keys() != ours.keys():
            raise ConfigError(
                f"the {config.to} naming is of {family}'s model with a top query layer; use --to huggingface"
            )
        files.write_tensors(config.output, files.from_ours(ours, table))
    print(f"{config.output}: {len(ours)} tensors, {sum(value.size for value in ours.values()):,} parameters")
    return 0


def _import_shards(config: ConvertConfig, source: PublishedFolder) -> int:
    assert config.strategy
    strategy = load_strategy(config.strategy)
    prepare_environment()
    shards = destinations(strategy, source.family, source.model, source.shapes)
    described = {**asdict(strategy.mesh), "file": str(config.strategy)}
    num_bytes = import_shards(source, config.output, shards, described)
    files = counted(len({file for parts in shards.values() for file, _ in parts}), "file", "files")
    print(
        f"{config.output}: {num_parameters(source.model):,} parameters of {source.family}, {num_bytes / 1e6:,.1f} MB in "
        f"{files} for {strategy.mesh}"
    )
    return 0


def _read(config: ConvertConfig) -> tuple[str, dict[str, Any], ModelConfig]:
    """Read family, weights under this package's names, and configuration of the input.

    Raises:
        ConfigError: missing, damaged, or not a model's.
    """
    if config.from_ == "huggingface":
        source = open_published(config.input, config.model)
        return source.family, read_published(source), source.model
    own_folder = config.from_ == "ours" and not config.layouts
    family = load_config(config.input)[0] if own_folder else config.model or DEFAULT_FAMILY
    if config.model not in (None, family):
        raise ConfigError(f"--model {config.model}: {config.input} holds a model of {family}")
    weights = family_module(family, "weights")
    for dialect in (config.from_, config.to):
        if dialect not in (*weights.TABLES, "ours"):
            raise ConfigError(
                f"{family} has no {dialect} naming; it has: {', '.join([*weights.TABLES, 'huggingface'])}"
            )
    prepare_environment()
    convert = import_module("sporeloom.checkpoint.convert")  # loads MindSpore, for .ckpt files
    tensors = (
        convert.read_rank_files(config.input, config.layouts) if config.layouts else convert.read_tensors(config.input)
    )
    aliases = {**weights.ALIASES.get(config.from_, {}), **({"model.": ""} if config.from_ == "ours" else {})}
    ours = convert.rename_aliases(tensors, aliases)
    if config.from_ != "ours":
        table = weights.TABLES[config.from_]
        ours = convert.to_ours(ours, names(table, convert.count_layers(ours, table) + 1), str(config.input))
    model = model_config(config, convert.dimensions(ours))
    check_weights(ours, parameter_shapes(model), str(config.input))
    return family, ours, model


def _check_flags(config: ConvertConfig) -> None:
    """Raises:
    ConfigError: flags that do not go together.
    """
    if config.to == "huggingface" and config.from_ != "ours":
        raise ConfigError(
            f"--to huggingface: IN must be a checkpoint folder; convert with --from {config.from_} --to ours first"
        )
    if "huggingface" not in (config.from_, config.to) and (config.model_type or config.dtype != "float32"):
        raise ConfigError("--model-type and --dtype are for --to huggingface and --from huggingface")
    if "huggingface" in (config.from_, config.to):
        unused = [name for name in ("size", "layouts", "config") if getattr(config, name) is not None]
        unused += ["dtype"] if config.ranks_of and config.dtype != "float32" else []
        unused += ["model_type"] if config.model_type and config.to != "huggingface" else []
        if unused:
            raise ConfigError(f"{', '.join(map(as_flag, unused))}: the folder's config.json says it all; leave it out")
    if config.strategy and (config.from_, config.to) != ("huggingface", "ours"):
        raise ConfigError(
            "--strategy is for --from huggingface --to ours; checkpoints of this package: sporeloom reshard-checkpoint"
        )
    if config.strategy and (config.dtype != "float32" or config.ranks_of):
        other = "--ranks-of" if config.ranks_of else "--dtype"
        raise ConfigError(f"{other} and --strategy do not go together; such a checkpoint is float32")
    if config.from_ == "huggingface" and config.to not in ("ours", "huggingface"):
        raise ConfigError(f"--from huggingface needs --to ours, not --to {config.to}")


def _check_output(config: ConvertConfig) -> Strategy | None:
    """Check the output, and load the strategy of --ranks-of, if it is given.

    Raises:
        ConfigError: the output cannot be written in this form.
    """
    if config.ranks_of:
        if config.to != "ours":
            raise ConfigError(f"--ranks-of writes this package's names; use --to ours, not --to {config.to}")
        return load_strategy(config.ranks_of)
    if config.to in ("megatron", "mindspore") and config.output.suffix not in (".npz", ".ckpt"):
        raise ConfigError(f"{config.output}: the {config.to} naming is written to a .npz or .ckpt file")
    if "huggingface" in (config.from_, config.to):
        return None  # they refuse what exists when they write
    return None
