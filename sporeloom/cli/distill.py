# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation: train a student to give the tokens of texts the probabilities that a teacher gives them.

sporeloom distill --from-checkpoint small/checkpoint --teacher large/checkpoint --data conversations.jsonl

Lines of --data: {"messages": [...]} or {"prompt": ..., "completion": ...}
"""

from collections.abc import Sequence

from sporeloom.train.distill import DistillConfig
from sporeloom.train.launch import run_training


def main(argv: Sequence[str]) -> int:
    return run_training("distill", DistillConfig, __doc__, argv)
