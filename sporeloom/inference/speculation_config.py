# SPDX-License-Identifier: Apache-2.0
"""Flags of speculative decoding and their checks: every mistake that can be found before MindSpore is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from sporeloom.checkpoint.model_folder import load_text_config, weight_problems
from sporeloom.core.command_line import option
from sporeloom.core.errors import Problems
from sporeloom.core.log import milestone
from sporeloom.core.numbers import Count
from sporeloom.data.tokenizer import content_hash, find_tokenizer
from sporeloom.models.config import ModelConfig
from sporeloom.models.weight_formats import WeightName
from sporeloom.strategy.config import Strategy


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    """Flags of drafts."""

    heading: ClassVar[str] = "speculative decoding"

    speculate: Literal["off", "ngram", "model", "mtp"] = option(
        "off",
        "draft tokens that one step verifies, which changes no answer; ngram: what followed the last tokens where they "
        "stand before, in the prompt or the answer; model: what --draft-model would say; mtp: what the model's own layers of "
        "multi-token prediction say",
    )
    draft_model: Path | None = option(
        None, "checkpoint folder of a smaller model with the same tokenizer, for --speculate model (default: none)"
    )
    num_speculative_tokens: Count = option(8, "maximum number of tokens drafted for a sequence in a step")

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafted tokens of a row; 0: none are."""
        return 0 if self.speculate == "off" else self.num_speculative_tokens

    @property
    def has_mtp(self) -> bool:
        """Whether layers of multi-token prediction draft."""
        return self.speculate == "mtp"


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts tokens for another one."""

    folder: Path
    family: str
    model: ModelConfig
    weights: WeightName
    """Name of the format of its matrices."""

    def context_problems(self, longest: int, remedy: str) -> list[str]:
        """List the reasons why it cannot read texts of up to so many tokens, with what may be done about it."""
        context = self.model.seq_len
        if context >= longest:
            return []
        return [
            f"--draft-model {self.folder}: its context of {context} tokens is shorter than the {longest} that a text may "
            f"have; {remedy}, or another draft model"
        ]


def speculation_problems(
    flags: SpeculationFlags, model: ModelConfig | None, strategy: Strategy | None = None
) -> list[str]:
    """List the reasons why a model's tokens cannot be drafted so."""
    problems = []
    if flags.speculate == "model" and flags.draft_model is None:
        problems.append("--speculate model needs a model that drafts; name its checkpoint folder with --draft-model")
    if flags.speculate != "model" and flags.draft_model is not None:
        problems.append(
            f"--draft-model {flags.draft_model} is for --speculate model, got {flags.speculate}; give both or none"
        )
    if flags.has_mtp and model and not model.num_mtp_layers:
        problems.append(
            "--speculate mtp: this model has no layers of multi-token prediction (num_mtp_layers 0); use --speculate ngram, "
            "or model with a --draft-model"
        )
    if strategy and strategy.mesh.size > 1 and strategy.engine == "mindspore" and flags.speculate in ("model", "mtp"):
        why = "computes drafts on one rank alone" if flags.speculate == "model" else "hands states from graph to graph"
        problems.append(
            f"{strategy.at('engine')}: --speculate {flags.speculate} {why}, which MindSpore's partitioner does not allow; "
            "remove the line"
        )
    return problems


def read_draft(
    flags: SpeculationFlags, target: tuple[str, ModelConfig], tokenizer: Path, domain: int | None, weights: WeightName
) -> DraftModel | None:
    """Read the configuration of the draft model, if there is one, for drafts of a model with this tokenizer.

    Args:
        target: family and configuration of that model.
        tokenizer: path of its tokenizer's file, or of the folder of that.
        domain: of all texts, where the draft model has domains as well.

    Raises:
        ConfigError: it cannot be read, or cannot draft for that model: all problems at once.
    """
    folder = flags.draft_model
    if flags.speculate != "model" or folder is None:
        return None
    problems = Problems()
    family, draft = load_text_config(folder)
    if draft.num_domains > 1:
        draft = problems.of(draft.with_domain, domain) or draft
    of_target, model = target
    tokenizer = find_tokenizer(of_target, tokenizer) if tokenizer.is_dir() else tokenizer
    problems += [f"--draft-model {folder}: {line}" for line in _differences(folder, family, draft, model, tokenizer)]
    problems.raise_if_any()
    if weight_problems(weights, folder, draft):  # groups of int4 or wide rows of w8a8; drafts change no answer
        milestone(f"--draft-model {folder}: its matrices do not fit --weights {weights}, so they have int8")
        weights = "int8"
    return DraftModel(folder, family, draft, weights)


def _differences(folder: Path, family: str, draft: ModelConfig, model: ModelConfig, tokenizer: Path) -> Iterator[str]:
    """The reasons why a draft model's tokens are not those of a model."""
    if draft.has_convolutions:
        yield "its convolutions keep states of the last tokens only, so that drafts cannot be taken back; choose another one"
    if draft.vocab_size != model.vocab_size:
        yield (
            f"its vocabulary has {draft.vocab_size} tokens, the model's {model.vocab_size}; choose a draft model with the "
            "same vocabulary"
        )
    own = find_tokenizer(family, folder)
    if not own.is_file():
        yield f"{own.name} is not there; a draft model needs the tokenizer that it was trained with, the model's own"
    elif not tokenizer.is_file():
        yield f"{tokenizer} is not there, to be compared with {own}; give --tokenizer FILE, the file itself"
    elif content_hash(own) != content_hash(tokenizer):
        yield f"{own} is another tokenizer than {tokenizer}; choose a draft model with the same one"
