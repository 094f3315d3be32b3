# SPDX-License-Identifier: Apache-2.0
"""The quantization of the matrices of a published folder: `quantization_config` of its config.json, or the file of its
own that AutoGPTQ (quantize_config.json) and AutoAWQ (quant_config.json) write.

Source: BaseQuantizeConfig of AutoGPTQ (github.com/AutoGPTQ/AutoGPTQ, auto_gptq/quantization/config.py), QuantizeConfig of
GPTQModel (github.com/ModelCloud/GPTQModel, gptqmodel/quantization/config.py), AwqConfig of AutoAWQ
(github.com/casper-hansen/AutoAWQ, awq/models/_config.py), GPTQConfig and AwqConfig of transformers 4.57
(utils/quantization_config.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sporeloom.checkpoint.compressed_schemes import Scheme, schemes_of
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import milestone_once
from sporeloom.core.reader import read_json

KEY = "quantization_config"
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of a folder whose config.json has no such key -> the method that writes them."""
INSTEAD = "use the folder of the unquantized model, or one that GPTQ or AWQ quantized to 4 bits"
COMPRESSED: Literal["compressed-tensors"] = "compressed-tensors"
ALIASES = {"w_bit": "bits", "q_group_size": "group_size", "format": "checkpoint_format", "is_sym": "sym"}
READ = (
    "quant_method",
    "bits",
    "group_size",
    "checkpoint_format",
    "version",
    "backend",
    "desc_act",
    "sym",
    "zero_point",
)
_IRRELEVANT = """
    act_group_aware batch_size block_name_to_quantize cache_block_outputs cache_examples_on_gpu damp_auto_increment
    damp_percent dataset disable_exllama do_fuse exllama_config fuse_max_seq_len lm_head max_input_length meta mse
    model_file_base_name model_name_or_path model_seqlen modules_in_block_to_quantize modules_to_fuse modules_to_not_convert
    module_name_preceding_first_block pad_token_id parallel_packing quantizer static_groups tokenizer true_sequential
    use_cuda_fp16 use_exllama v2 is_marlin_format dynamic pack_dtype
"""
IRRELEVANT = frozenset(_IRRELEVANT.split())
"""Keys of how a model was quantized, and of other readers: the tensors themselves show which matrices were."""


@dataclass(frozen=True)
class Quantization:
    """A method that is read here."""

    method: Literal["gptq", "awq", "compressed-tensors"]
    group_size: int = 0
    """Columns of a row that share a scale; -1: all. Of GPTQ and AWQ."""
    is_first: bool = False
    """Whether it is GPTQ's first version, whose stored zero points are less 1."""
    by_gptqmodel: bool = False
    """Whether GPTQModel says that it wrote it."""
    schemes: tuple[Scheme, ...] = ()
    """Settings of the matrices of compressed-tensors."""


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization of the matrices of a published folder with this config.json; None: there is none.

    Raises:
        ConfigError: a method or a layout that is not read here, by all keys that say so.
    """
    source, values, method = f"{folder / 'config.json'}: {KEY}", config.get(KEY), None
    if values is None:
        name = next((name for name in FILES if (folder / name).is_file()), None)
        if name is None:
            return None
        source, values, method = str(folder / name), read_json(folder / name).mapping, FILES[name]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source} must be a mapping of keys, got {values!r}")
    method = str(values.get("quant_method") or method or "").lower()
    if method == COMPRESSED:
        return Quantization(COMPRESSED, schemes=schemes_of(values, source))
    values = {ALIASES.get(key, key): value for key, value in values.items()}
    if method not in ("gptq", "awq"):
        raise ConfigError(
            f"{source}.quant_method is {method or 'missing'}; only gptq, awq and {COMPRESSED} are read: {INSTEAD}"
        )
    if problems := [f"{source}.{problem}" for problem in _problems(method, values)]:
        raise ConfigError(problems)
    if unknown := [key for key in values if key not in IRRELEVANT and key not in READ]:
        milestone_once(f"{source}: keys that are unknown and ignored: {', '.join(unknown)}")
    is_first = method == "gptq" and str(values.get("checkpoint_format")).lower() != "gptq_v2"
    by_gptqmodel = "gptqmodel" in str(values.get("meta")).lower()
    return Quantization(method, values["group_size"], is_first, by_gptqmodel)  # type: ignore[arg-type]


def _problems(method: str, values: Mapping[str, Any]) -> Iterator[str]:
    bits, size = values.get("bits"), values.get("group_size")
    if bits != 4 or isinstance(bits, bool):
        yield f"bits is {bits!r}; only 4 is read: {INSTEAD}"
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and size < 1):
        yield f"group_size is {size!r}; it must be the number of columns of a group, or -1"
    layouts = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm", "awq")}[method]
    layout = values.get("checkpoint_format")
    if layout is not None and str(layout).lower() not in layouts:
        yield f"checkpoint_format is {layout!r}; only {' and '.join(layouts)} are read: {INSTEAD}"
    if values.get("is_marlin_format"):
        yield f"is_marlin_format is true; matrices packed for Marlin kernels are not read: {INSTEAD}"
    if values.get("dynamic"):
        yield f"dynamic gives some matrices settings of their own, which is not read: {INSTEAD}"
    if values.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        yield f"pack_dtype is {values['pack_dtype']!r}; only int32 is read: {INSTEAD}"
    if method == "awq":
        version, backend = values.get("version", "gemm"), values.get("backend", "autoawq")
        if str(version).lower() != "gemm":
            yield f"version is {version!r}; only gemm is read: {INSTEAD}"
        if str(backend).lower() not in ("autoawq", "auto"):
            yield f"backend is {backend!r}; only autoawq is read: {INSTEAD}"
