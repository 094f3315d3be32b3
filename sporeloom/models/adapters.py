# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA): which matrices have one, and their shapes. Source: arXiv:2106.09685, arXiv:2312.03732."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Positive, Rate
from sporeloom.core.reader import read_json
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import Shapes, decoder_specs, parameter_shapes
from sporeloom.models.parts.experts import STACKED
from sporeloom.models.parts.spec import ZEROS, InitialValue, ParameterSpec, Specs
from sporeloom.models.paths import alternatives, path_matches

ADAPTER_CONFIG = "adapter_config.json"
TEXT, REWARD = "CAUSAL_LM", "SEQ_CLS"
"""PEFT's `task_type`."""
LORA_A, LORA_B = ".lora_a", ".lora_b"
"""Endings of an adapter's parameter names: (r, in) and (out, r)."""
HEAD = "head.weight"
"""Full matrix that a reward model trains besides adapters: it is new."""
QKV = ("attention.query", "attention.key", "attention.value")
ALIASES: dict[str, tuple[str, ...]] = {
    "all-linear": ("*",),
    "q_proj": ("attention.query",),
    "k_proj": ("attention.key",),
    "v_proj": ("attention.value",),
    "o_proj": ("attention.output",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
    # Latent attention
    "q_a_proj": ("attention.query_down",),
    "q_b_proj": ("attention.query_up",),
    "kv_a_proj_with_mqa": ("attention.kv_down",),
    "kv_b_proj": ("attention.kv_up",),
    # One matrix in other packages, several here, each with an adapter of its own
    "qkv_proj": QKV,
    "query_key_value": QKV,
    "gate_up_proj": ("gate", "up"),
    "dense_h_to_4h": ("gate", "up"),
    "dense_4h_to_h": ("down",),
    "dense": ("attention.output",),
    # GPT-2
    "c_attn": QKV,
    "c_fc": ("mlp.up",),
    "c_proj": ("attention.output", "mlp.down"),
}
"""Names of matrices in Hugging Face models, as in PEFT's `target_modules` -> ends of paths in this package."""
ALIASES_OF_PARENTS = {
    **dict.fromkeys(("self_attn", "self_attention", "attn"), "attention"),
    **dict.fromkeys(("shared_expert", "shared_experts"), "shared"),
    "h": "layers",
}
ROOTS = ("model", "transformer", "encoder")
MAX_ABOVE = 16
"""Maximum number of adapters that are merged one after another."""
LORA_MASK = ".lora_mask"
"""Table of the rows of A that belong to each adapter, where several adapters are applied in one batch."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters of some matrices W (out, in): W + scale * B A. Fields have PEFT's names."""

    r: Count = 8
    """Rank."""
    lora_alpha: Positive = 8.0
    """The scale is this / r."""
    lora_dropout: Rate = 0.0
    """Dropout rate of an adapter's input in training."""
    target_modules: tuple[str, ...] = ("attention.query", "attention.value")
    """Endings of the paths of the matrices; * stands for one component. Hugging Face's names are replaced by these."""
    use_rslora: bool = False
    """The scale is lora_alpha / sqrt(r)."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Rank of single matrices, by path, in place of r."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alpha of single matrices, by path, in place of lora_alpha."""

    def __post_init__(self) -> None:
        ends = (end for target in self.target_modules for end in target_paths(target))  # a list in JSON
        object.__setattr__(self, "target_modules", tuple(dict.fromkeys(ends)))

    def r_of(self, path: str) -> int:
        return self.ranks.get(path, self.r)

    def scale(self, path: str) -> float:
        """Factor of the adapter of a matrix."""
        rank, alpha = self.r_of(path), self.alphas.get(path, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, model: ModelConfig) -> list[str]:
        """Paths of the matrices that have an adapter.

        Raises:
            ConfigError: a pattern that none matches.
        """
        linear = linear_paths(model)
        for pattern in (one for target in self.target_modules for one in alternatives(target)):
            if not any(path_matches(pattern, path) for path in linear):
                known = sorted({".".join(path.split(".")[-2:]) for path in linear})
                raise ConfigError(
                    f"--lora-targets (target_modules): {pattern} matches no matrix; there are {', '.join(known)}"
                )
        return [path for path in linear if any(path_matches(pattern, path) for pattern in self.target_modules)]

    def specs(self, model: ModelConfig) -> Specs:
        """Each trained parameter: those of adapters, which change nothing at first, and the head of a reward model.

        Source: PEFT's initial values.
        """
        weights = decoder_specs(model)
        for path in self.targets(model):
            (outer, inner), rank = weights[f"{path}.weight"].shape, self.r_of(path)
            bound = InitialValue("uniform", 1 / math.sqrt(inner))
            yield ParameterSpec(path + LORA_A, (rank, inner), bound, "matrix")
            yield ParameterSpec(path + LORA_B, (outer, rank), ZEROS, "matrix")
        if model.value_head:
            yield weights[HEAD]

    def shapes(self, model: ModelConfig) -> Shapes:
        """Shape of each trained parameter."""
        return {spec.name: spec.shape for spec in self.specs(model)}


def target_paths(target: str) -> list[str]:
    """Ends of the paths in this package that a target stands for: itself, or those of a Hugging Face name, as `q_proj` or
    `layers.0.self_attn.q_proj`."""
    *parents, names = target.split(".")
    if not any(name in ALIASES for name in names.split("|")):
        return [target]
    above = [ALIASES_OF_PARENTS.get(parent, parent) for parent in parents if parent not in ROOTS]
    found = []
    for end in (end for name in names.split("|") for end in ALIASES.get(name, (name,))):
        first, _, rest = end.partition(".")
        found.append(".".join([*above, rest if rest and above and above[-1] == first else end]))
    return found


def linear_paths(model: ModelConfig) -> list[str]:
    """Matrices of layers, by the paths of their Cells. Those of routed experts are stacked, and cannot have
    adapters."""
    return [
        name.removesuffix(".weight")
        for name, shape in parameter_shapes(model).items()
        if name.startswith(("layers.", "query_layer.")) and name.endswith(".weight") and len(shape) == 2
        if STACKED not in name and not name.endswith("mlp.router.weight")
    ]


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's, by its name."""
    return name.endswith((LORA_A, LORA_B))


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds adapters in place of a model."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_reward_adapter(folder: Path) -> bool:
    """Whether adapters make a reward model of the model they are for."""
    return read_json(folder / ADAPTER_CONFIG).mapping.get("task_type") == REWARD


def base_folder(folder: Path) -> Path:
    """Find the checkpoint folder that the adapters of `folder` belong to. A relative path starts at `folder`, or
    at the working directory. That folder may hold adapters itself, which are merged first.

    Raises:
        ConfigError: it is not said, or not there; adapters that belong to each other.
    """
    base = above = _named_base(folder)
    below = [folder.resolve()]
    while is_adapter_folder(above):
        below.append(above.resolve())
        above = _named_base(above)
        if above.resolve() in below or len(below) > MAX_ABOVE:
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG}: base_model_name_or_path: the adapters there belong to "
                + ("each other in a circle" if above.resolve() in below else f"more than {MAX_ABOVE} others in a row")
                + "; one of them must name the folder of a model"
            )
    return base


def _named_base(folder: Path) -> Path:
    """Read the folder that the configuration of `folder` names."""
    document = read_json(folder / ADAPTER_CONFIG)
    name = document.mapping.get("base_model_name_or_path")
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(
            f"{document.source}: no base_model_name_or_path; write there the folder of the model they are for"
        )
    for path in (folder / name, Path(name)):
        if path.is_dir() and path.resolve() == folder.resolve():
            raise ConfigError(f"{document.source}: base_model_name_or_path {name}: their own folder; name the model's")
        if path.is_dir():
            return path
    raise ConfigError(f"{document.source}: base_model_name_or_path {name}: there is no such folder")
