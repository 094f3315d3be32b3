# SPDX-License-Identifier: Apache-2.0
"""Flags of the monitor of attention logits and of QK-clip, of tasks that train by the cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from sporeloom.core.command_line import option
from sporeloom.core.numbers import Positive
from sporeloom.models.config import ModelConfig
from sporeloom.strategy.config import Strategy
from sporeloom.train.groups import ParameterGroups

PATTERNS = tuple(f"*attention.{part}.*" for part in ("query", "key", "query_up", "kv_up"))
"""Names of the parameters that QK-clip scales."""


@dataclass(frozen=True, kw_only=True)
class MaxLogitFlags:
    """The largest attention logits, and what follows from them."""

    heading: ClassVar[str] = "attention logits"

    log_max_attention_logit: bool = option(
        False, "measure the largest attention logit of each step over its batch, layers and heads, as a metric"
    )
    qk_clip_threshold: Positive | None = option(
        None,
        "threshold of QK-clip (MuonClip), such as 100: after each update, heads whose largest attention logit exceeded it "
        "get queries and keys scaled down, so that the same logit would not exceed it (default: no QK-clip)",
    )

    @property
    def counts_max_logits(self) -> bool:
        """Whether steps count the largest logits."""
        return self.log_max_attention_logit or self.qk_clip_threshold is not None

    def max_logit_problems(
        self,
        model: ModelConfig,
        strategy: Strategy,
        groups: ParameterGroups | None,
        has_adapters: bool,
        drops_tokens: bool,
    ) -> Iterator[str]:
        """List what does not go together with these flags. `drops_tokens`: layers see parts of the sequences."""
        if not self.counts_max_logits:
            return
        given: Any = self
        clips = self.qk_clip_threshold is not None
        flag = f"--qk-clip-threshold {self.qk_clip_threshold:g}" if clips else "--log-max-attention-logit"
        if model.attention_on_ascend == "flash":
            yield f"{flag}: FlashAttention does not return its largest logits; give --attention plain"
        if strategy.mesh.size > 1 and not strategy.is_spmd:
            yield f"{strategy.at('engine')}: {flag} is for engine: spmd, not for MindSpore's partitioner; change either"
        if drops_tokens:
            yield f"{flag}: some layers do not see the tokens that --random-ltd-min-value drops; leave either out"
        if not clips:
            return
        if has_adapters:
            yield f"{flag}: adapters leave the weights of queries and keys as they are; leave it out"
        if given.certificate:
            yield f"--certificate {given.certificate}: it covers runs without --qk-clip-threshold; leave either out"
        frozen = [
            name for name in (groups.frozen_names if groups else ()) if any(fnmatchcase(name, p) for p in PATTERNS)
        ]
        if frozen := [name for name in frozen if ".indexer." not in name]:
            yield f"{flag}: {frozen[0]} is frozen, so it cannot be scaled; leave either out"
