# SPDX-License-Identifier: Apache-2.0
"""Read an adapter_config.json of PEFT: each field is used, has no effect on the computation, or is refused.

Source: PEFT 0.21.2: tuners/lora/config.py, `LoraLayer.update_layer`, `check_target_module_exists`, `get_pattern_key`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sporeloom.checkpoint.finite import FLOAT32_MAX
from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.numbers import is_finite
from sporeloom.core.patterns import Found, Pattern, match_patterns
from sporeloom.core.reader import fields_from
from sporeloom.models.adapters import LoRAConfig

PLAIN_FIELDS = ("r", "lora_alpha", "lora_dropout", "use_rslora")
"""Fields that this package has, too."""
NUMBERS = ("r", "lora_alpha", "lora_dropout")
TARGETS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
HONOURED = (
    *PLAIN_FIELDS,
    *TARGETS,
    *("rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("modules_to_save", "base_model_name_or_path", "task_type"),
)
"""Fields that are read, here and in `sporeloom.models.adapters`."""
REFUSED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "lora_bias": False,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
}
"""Fields of unsupported computations -> the one value that switches them off."""
IRRELEVANT = (
    *("auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config"),
    *("megatron_config", "megatron_core"),  # of Megatron's layers, which a published model does not have
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of an `init_lora_weights`
    *("velora_config",),  # of the backward pass
    *("qalora_group_size",),  # of use_qalora
    *("ensure_weight_tying",),  # of embeddings, which cannot have adapters here
)
"""Fields without effect on the computation of trained adapters."""
PLAIN_INITS = (True, False, None, "true", "false", "gaussian", "eva", "orthogonal", "mica")
"""`init_lora_weights` that leave the base model's weights as they are."""
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of values that subtract the initial adapters from the base model's weights, also when PEFT opens such
a folder."""
SAVED_OF_REWARD = {"score", "classifier"}
"""`modules_to_save` of a reward model: names that its head may have."""


@dataclass(frozen=True)
class PeftConfig:
    """A valid configuration."""

    lora: LoRAConfig
    """Values for every matrix that no pattern matches."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | list[str] | None
    exclude_modules: str | list[str] | None
    layers_to_transform: int | list[int] | None
    layers_pattern: str | list[str] | None
    matches: Mapping[Pattern, Found]
    """Modules that each pattern matches."""

    def rank(self, module: str) -> int:
        """Rank of the adapter of a module, by its path in the base model."""
        return self._first_match(self.rank_pattern, module, self.lora.r)

    def alpha(self, module: str) -> float:
        """Its lora_alpha."""
        return self._first_match(self.alpha_pattern, module, self.lora.lora_alpha)

    def is_target(self, module: str) -> bool:
        """Whether PEFT gives a linear module an adapter. Without target_modules it goes by a table of its own; here by the
        tensors."""
        if self.exclude_modules and self._names(self.exclude_modules, module):
            return False
        targets = self.target_modules
        if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
            return True
        if isinstance(targets, str) or module in targets:
            return self._names(targets, module)
        return self._names(targets, module) and self._is_chosen_layer(module)

    def _is_chosen_layer(self, module: str) -> bool:
        chosen = self.layers_to_transform
        if chosen is None or chosen == []:
            return True
        found = (self.matches[pattern].get(module) for pattern in _layer_patterns(self.layers_pattern))
        layer = next(filter(None, found), {"layer": None})["layer"]
        return layer is not None and int(layer) in ([chosen] if isinstance(chosen, int) else chosen)

    def _first_match(self, patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
        """The value of the first pattern, in the file's order, that matches the end of a module's path."""
        return next((patterns[p] for p in patterns if module in self.matches[_at_the_end(p)]), otherwise)

    def _names(self, targets: str | list[str], module: str) -> bool:
        """Whether a regular expression matches a module's full path, or one of several names its end."""
        if isinstance(targets, str):
            return module in self.matches["fullmatch", targets]
        return any(module == target or module.endswith(f".{target}") for target in targets)


def read_peft_config(document: Document, modules: Sequence[str]) -> PeftConfig:
    """Read the configuration of adapters and check every field. `modules`: all modules of the base model.

    Raises:
        ConfigError: invalid values, and adapters that are not W + scale * B A of the base model's W.
    """
    values, problems = document.mapping, Problems()
    given = {name: values[name] for name in PLAIN_FIELDS if values.get(name) is not None}
    lora = problems.of(fields_from, LoRAConfig, Document(document.source, given, document.lines))
    problems += [f"{document.source}: {problem}" for problem in (*_wrong_values(values), *_other_kinds(values))]
    problems.raise_if_any()
    assert lora
    named: dict[str, Any] = {name: values.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    named |= {name: values.get(name) for name in TARGETS}
    return PeftConfig(lora, **named, matches=_matches(document, named, modules))


def _matches(document: Document, values: Mapping[str, Any], modules: Sequence[str]) -> dict[Pattern, Found]:
    """Match every pattern of the configuration.

    Raises:
        ConfigError: one is not a regular expression, or they take too long.
    """
    patterns = {
        **{
            _at_the_end(pattern): (name, pattern)
            for name in ("rank_pattern", "alpha_pattern")
            for pattern in values[name]
        },
        **dict.fromkeys(_layer_patterns(values["layers_pattern"]), ("layers_pattern", values["layers_pattern"])),
    }
    for name in ("target_modules", "exclude_modules"):
        if isinstance(values[name], str):
            patterns["fullmatch", values[name]] = (name, values[name])
    try:
        found = match_patterns(patterns, modules)
    except ConfigError as error:
        names = ", ".join(dict.fromkeys(name for name, _ in patterns.values()))
        raise ConfigError(f"{document.source}: {names}: {error.problems[0]}") from None
    wrong = [(*patterns[pattern], why) for pattern, why in found.items() if isinstance(why, str)]
    if wrong:
        raise ConfigError(
            f"{document.source}: {name}: {pattern!r} is not a regular expression: {why}" for name, pattern, why in wrong
        )
    return {pattern: matched for pattern, matched in found.items() if not isinstance(matched, str)}


def _at_the_end(pattern: str) -> Pattern:
    """Pattern that PEFT makes of a key of rank_pattern."""
    return "match", rf"(.*\.)?({pattern})$"


def _layer_patterns(layers_pattern: str | list[str] | None) -> list[Pattern]:
    """Pattern that finds the number of a module's layer."""
    names: Iterable[str] = [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern or []
    begins = [rf"(?:^|.*?\.){name}" for name in names] or [r".*?\.[^.]*"]
    return [("match", rf"{begin}\.(?P<layer>\d+)\.") for begin in begins]


def _other_kinds(values: Mapping[str, Any]) -> Iterator[str]:
    """List fields that make PEFT compute something else."""
    for name, plain in REFUSED.items():
        if values.get(name, plain) != plain:
            yield f"{name} is {values[name]!r}; only {plain!r} is supported"
    known = (*HONOURED, *REFUSED, *IRRELEVANT)
    for name in [name for name, value in values.items() if name not in known and value]:
        yield f"{name} is {values[name]!r}, an unknown field; remove it if it has no effect"
    begin = values.get("init_lora_weights", True)
    word = begin.lower() if isinstance(begin, str) else begin
    if isinstance(word, str) and word.startswith(CHANGED_BASES):
        yield (
            f"init_lora_weights is {begin!r}: the adapters belong to a base model whose weights were changed when their "
            "training began; write them for the original one with PEFT's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...), or the merged model with merge_and_unload()"
        )
    elif word not in PLAIN_INITS:
        yield f"init_lora_weights is {begin!r}, which is unknown"
    saved = values.get("modules_to_save") or ()
    if not isinstance(saved, list | tuple) or not set(map(str, saved)) <= SAVED_OF_REWARD:
        yield f"modules_to_save is {saved!r}; only a reward model's score is supported"


def _wrong_values(values: Mapping[str, Any]) -> Iterator[str]:
    for name in NUMBERS:
        if name in values and values[name] is None:
            yield f"{name} is null, which PEFT cannot compute with; write the number that the adapters were trained with"
    alpha = values.get("lora_alpha")
    if isinstance(alpha, int | float) and not isinstance(alpha, bool) and FLOAT32_MAX < alpha < math.inf:
        yield f"lora_alpha is {_short(alpha)}; float32 ends at {FLOAT32_MAX:.3g}"
    for name in ("rank_pattern", "alpha_pattern"):
        found = values.get(name) or {}
        if not isinstance(found, dict):
            yield f"{name} must be a mapping of patterns, got {found!r}"
            continue
        for pattern, value in found.items():
            if problem := _number_problem(value, whole=name == "rank_pattern"):
                yield f"{name}: {pattern} {problem}, got {_short(value)}"
            elif value > FLOAT32_MAX:
                yield f"{name}: {pattern} is {_short(value)}; float32 ends at {FLOAT32_MAX:.3g}"
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        found = values.get(name)
        is_list = isinstance(found, list) and all(isinstance(entry, str) for entry in found)
        if found is not None and not isinstance(found, str) and not is_list:
            yield f"{name} must be a text or a list of texts, got {found!r}"
    chosen = values.get("layers_to_transform")
    if not all(type(layer) is int for layer in (chosen if isinstance(chosen, list) else [chosen or 0])):
        yield f"layers_to_transform must be numbers of layers, got {chosen!r}"
    if isinstance(values.get("target_modules"), str) and (chosen is not None or values.get("layers_pattern")):
        yield "layers_to_transform and layers_pattern need a list of target_modules, not a pattern"


def _number_problem(value: Any, whole: bool) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return "must be a whole number" if whole else "must be a number"
    return None if is_finite(value) and value > 0 else "must be above 0 and finite"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
