# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of a checkpoint: all weights, or adapters.

sporeloom sft --from-checkpoint out/latest/checkpoint --data conversations.jsonl --chat-template chat.jinja
sporeloom sft --from-checkpoint out/latest/checkpoint --data answers.jsonl --lora-r 8 --strategy pangu_tiny_dp2_tp2 --launch

Lines of --data: {"prompt": ..., "completion": ...}, or {"messages": [{"role": "user", "content": ...}, ...]}
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.tuning import SFTConfig


def main(argv: Sequence[str]) -> int:
    return run_training("sft", SFTConfig, __doc__, argv)
