# SPDX-License-Identifier: Apache-2.0
"""RoPE whose angles are scaled so that a model reads longer texts than it was first trained on.

Source: linear arXiv:2306.15595, NTK the post "NTK-Aware Scaled RoPE" of bloc97, YaRN arXiv:2309.00071, llama3 the Llama 3.1
release; the published keys and defaults are those of transformers 4.57 (modeling_rope_utils.py) and of DeepSeek-V3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.numbers import Count, NotNegative, Positive, number_problems

Kind = Literal["linear", "dynamic", "ntk", "yarn", "llama3"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of angles. Frequency i of dim rotated features is theta^(-2 i / dim) without it."""

    kind: Kind
    """linear: frequencies / factor. ntk: theta times factor^(dim / (dim - 2)). dynamic: the same with a factor that grows
    with the document beyond original_seq_len. yarn: high frequencies stay, low ones are divided by the factor. llama3: the
    same with other limits."""
    factor: Positive = 1.0
    original_seq_len: Count | None = None
    """Length in tokens of the texts before scaling; for dynamic, yarn and llama3."""
    beta_fast: Positive = 32.0
    """yarn: frequencies with more rotations than this over the original length stay."""
    beta_slow: Positive = 1.0
    """yarn: those with fewer rotations than this are divided by the factor."""
    truncate: bool = True
    """yarn: the limits between both are whole features."""
    attention_factor: Positive | None = None
    """yarn: factor of cosines and sines; default: 0.1 ln(factor) + 1, or what mscale and mscale_all_dim give."""
    mscale: NotNegative = 0.0
    mscale_all_dim: NotNegative = 0.0
    """yarn: with mscale the attention factor is that of mscale / that of this one. Latent attention also multiplies
    its scores by the square of the latter. 0: not given."""
    low_freq_factor: Positive = 1.0
    """llama3: frequencies of wavelengths above original_seq_len / this are divided by the factor."""
    high_freq_factor: Positive = 4.0
    """llama3: those of wavelengths below original_seq_len / this stay."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        yield from number_problems(self, lambda name: f"rope_scaling.{name}")
        if self.kind not in get_args(Kind):
            yield f"rope_scaling.kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}"
        elif self.kind in ("dynamic", "yarn", "llama3") and self.original_seq_len is None:
            yield f"rope_scaling.original_seq_len is missing; {self.kind} needs it"
        elif self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            yield (
                f"rope_scaling.high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}"
            )

    @property
    def original(self) -> int:
        """`original_seq_len` of a kind that has it."""
        assert self.original_seq_len is not None
        return self.original_seq_len

    @property
    def of_angles(self) -> float:
        """Factor of cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def of_latent_scores(self) -> float:
        """Factor of latent attention's scores besides 1 / sqrt(head_dim). Source: DeepSeek-V3."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.kind == "yarn" else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def base_factor(self, dim: int, length: int | None = None) -> float:
        """Factor of theta for `dim` rotated features; of dynamic scaling for documents of `length` tokens."""
        if dim <= 2 or self.kind not in ("ntk", "dynamic"):
            return 1.0
        growth = self.factor
        if self.kind == "dynamic":
            growth = self.factor * max(length or 0, self.original) / self.original - (self.factor - 1)
        return float(growth ** (dim / (dim - 2)))

    def of_frequency(self, frequency: float, pair: int, dim: int, theta: float) -> float:
        """Factor of the frequency of a pair of features."""
        if self.kind == "linear":
            return 1 / self.factor
        if self.kind == "llama3":
            rotations = self.original * frequency / (2 * math.pi)
            if rotations < self.low_freq_factor or rotations > self.high_freq_factor:
                return 1 / self.factor if rotations < self.low_freq_factor else 1.0
            kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            return (1 - kept) / self.factor + kept
        if self.kind == "yarn":
            low, high = self._limits(dim, theta)
            scaled = min(max((pair - low) / (high - low), 0.0), 1.0)
            return scaled / self.factor + 1 - scaled
        return 1.0

    def _limits(self, dim: int, theta: float) -> tuple[float, float]:
        """The pairs between which YaRN goes over from unscaled to scaled."""

        def pair(rotations: float) -> float:
            return dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 * (low == high)


def frequencies(theta: float, dim: int, scaling: RopeScaling | None = None, length: int | None = None) -> list[float]:
    """Angle by which each of dim / 2 pairs of features turns from one position to the next, in radians.

    `length`: tokens of the document, which dynamic scaling depends on; None: no more than the original length.
    """
    if scaling is None:
        return [theta ** (-2 * pair / dim) for pair in range(dim // 2)]
    base = theta * scaling.base_factor(dim, length)
    plain = [base ** (-2 * pair / dim) for pair in range(dim // 2)]
    return [value * scaling.of_frequency(value, pair, dim, theta) for pair, value in enumerate(plain)]


_ORIGINAL = "original_max_position_embeddings"
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha"),
    "ntk": ("factor", "alpha"),
    "fixed_ntk": ("factor", "alpha"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""rope_type -> the keys that it has besides those of every type."""
_EVERYWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL)
_NEEDED = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}


def read_scaling(key: str, given: Mapping[str, Any], seq_len: int | None) -> dict[str, Any] | None:
    """The fields of `RopeScaling` from `rope_scaling` or `rope_parameters` (`key`) of a config.json; None: unscaled.

    `seq_len`: its maximum length, which is the original one where that is not given.

    Raises:
        ConfigError: another scaling, a key that it does not have, one that is missing or no number.
    """
    values = {name: value for name, value in given.items() if value is not None}
    kind = _kind(key, values)
    if problems := list(_key_problems(key, kind, values)):
        raise ConfigError(problems)
    if kind == "default" or (kind == "linear" and values["factor"] == 1):
        return None
    if "alpha" in values or kind == "fixed_ntk":  # the factor itself, whatever the length
        return {"kind": "ntk", "factor": values.get("alpha", values.get("factor"))}
    fields = {name: values[name] for name in _KEYS[kind] if name in values}
    if kind in ("dynamic", "yarn", "llama3"):
        fields["original_seq_len"] = values.get(_ORIGINAL, seq_len)
        if kind == "dynamic" and seq_len is not None and fields["original_seq_len"] != seq_len:
            raise ConfigError(
                f"{key}.{_ORIGINAL} is {values[_ORIGINAL]}; dynamic scaling starts from max_position_embeddings {seq_len}: "
                "remove it, or make both equal"
            )
    return {"kind": kind, **fields}


def _kind(key: str, values: Mapping[str, Any]) -> str:
    words = {name: values[name] for name in ("rope_type", "type") if name in values}
    for name, kind in words.items():
        if kind not in _KEYS:
            hint = did_you_mean(str(kind), tuple(_KEYS))
            raise ConfigError(f"{key}.{name} is {kind!r}, which is not supported{hint}; supported: {', '.join(_KEYS)}")
    if len(set(words.values())) > 1:
        told = " and ".join(f"{key}.{name} {kind!r}" for name, kind in words.items())
        raise ConfigError(f"{told} contradict each other; leave one")
    return str(next(iter(words.values()), "default"))


def _key_problems(key: str, kind: str, values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if name in ("rope_type", "type"):
            continue
        if name not in (*_KEYS[kind], *_EVERYWHERE):
            if value not in (1, False):
                yield f"{key}.{name} is {value!r}; {kind} scaling has no such key"
        elif name == "truncate":
            if not isinstance(value, bool):
                yield f"{key}.truncate must be true or false, got {value!r}"
        elif isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{key}.{name} must be a number, got {value!r}"
    for name in _NEEDED.get(kind, ()):
        if name not in values:
            yield f"{key}.{name} is missing; {kind} scaling needs it"
    if kind in ("dynamic", "ntk", "fixed_ntk") and not {"factor", "alpha"} & values.keys():
        yield f"{key}.factor is missing; {kind} scaling needs it or alpha"


def written_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """`rope_scaling` of a config.json, by its key; empty for unscaled angles."""
    if scaling is None:
        return {}
    if scaling.kind == "ntk":  # dynamic with a constant alpha, as Hunyuan writes it
        return {"rope_scaling": {"rope_type": "dynamic", "type": "dynamic", "alpha": scaling.factor}}
    fields = {name: getattr(scaling, name) for name in _KEYS[scaling.kind] if hasattr(scaling, name)}
    given = {name: value for name, value in fields.items() if bool(value) != (name == "truncate")}
    original = {} if scaling.kind in ("linear", "dynamic") else {_ORIGINAL: scaling.original}
    return {"rope_scaling": {"rope_type": scaling.kind, "type": scaling.kind, **given, **original}}
