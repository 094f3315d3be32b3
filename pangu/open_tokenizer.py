# SPDX-License-Identifier: Apache-2.0
"""openPangu's tokenizer: SentencePiece with special tokens among its pieces, and the format of its conversations.

Source: openPangu-Embedded-7B-V1.1 tokenization_openpangu.py, tokenizer_config.json and its chat template. The released
vocabulary is not at hand here: this is tested on one made in its format. Text between special tokens is tokenized on its own,
as the released class does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.data.pieces import PieceTokenizer, described
from sporeloom.data.special_tokens import Span, content, template
from sporeloom.data.tokenizer import ChatMessage

TURN, END = "[unused9]", "[unused10]"
SPECIAL = ("<|User|>:", "<|Bot|>:", *(f"[unused{i}]" for i in range(34)))
ROLES = {"system": "系统", "user": "用户", "assistant": "助手", "tool": "工具"}


class OpenPanguTokenizer(PieceTokenizer):
    """Reads the SentencePiece model of openPangu-Embedded or Pangu Pro MoE."""

    benchmark_form = "chat"
    """Prompt form of HumanEval-X for such a model."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        if not has_turns(self):
            raise ConfigError(
                f"{path}: not openPangu's tokenizer, which has {TURN} and {END}, but {described(self.file)}"
            )
        ids = {name: self.pieces.piece_to_id(name) for name in SPECIAL}
        self.special = {name: i for name, i in ids.items() if i != self.pieces.unk_id()}
        self.prefix = [self.pieces.bos_id()]
        self.eod_id: int = self.special[END]

    def chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[Span]:
        """The published template, up to where the assistant speaks. Without a system message there is an empty
        one."""
        if not messages or messages[0].role != "system":
            messages = [ChatMessage("system", ""), *messages]
        spans: list[Span] = []
        for message in messages:
            spans += [template(f"{TURN}{ROLES[message.role]}："), content(message.content), template(END)]
        return [*spans, template(f"{TURN}{ROLES['assistant']}：")] if add_generation_prompt else spans


def has_turns(tokenizer: PieceTokenizer) -> bool:
    """Whether a SentencePiece model has the pieces that open and close a turn, and one that begins a text."""
    found = {name for name, _ in tokenizer.file.kinds}
    return {TURN, END} <= found and tokenizer.pieces.bos_id() >= 0
