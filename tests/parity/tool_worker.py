# SPDX-License-Identifier: Apache-2.0
"""Runs GRPO with tools for test_tool_training: half of the first answers call one, all else is the model's own."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np

from sporeloom.runtime.environment import launched_processes
from sporeloom.train.checks import check
from sporeloom.train.policy import GRPOConfig

CALL = '<tool_call>\n{"name": "hour", "arguments": {}}\n</tool_call>'
PATHS = ("data", "from_checkpoint", "strategy", "output_dir", "chat_template")


def run(flags):
    """Train, and write the batches of the steps to OUTPUT_DIR/batches.npz on one device."""
    train = import_module("sporeloom.train.trainer").train  # loads MindSpore
    rollouts, grpo = import_module("sporeloom.tasks.rollouts"), import_module("sporeloom.tasks.grpo").GRPO
    interval = import_module("sporeloom.tasks.tool_rollouts").TURN_STREAMS
    sampler, batch, written = rollouts.Sampler, grpo.batch, {}
    choose = sampler.choose

    def forced(self, logits, history, stream=0):
        own = choose(self, logits, history, stream)
        place = len(history.generated)
        return forced.script[place] if stream % 2 == 0 and stream < interval and place < len(forced.script) else own

    def kept(self, step):
        tokenizer = self.tokenizer
        forced.script = [*tokenizer.encode_continuation(CALL), tokenizer.eod_id]
        arrays = batch(self, step)
        masks = [text.example(self.prompts).learned for text in self.collected.texts]
        written.update({f"{step}.{place}": np.asarray(array) for place, array in enumerate(arrays)})
        written[f"{step}.learned"] = np.concatenate(masks)
        written[f"{step}.sampled"] = self.collected.sampled
        return arrays

    sampler.choose, grpo.batch = forced, kept
    try:
        given = {flag: Path(value) if flag in PATHS and value else value for flag, value in flags.items()}
        given = {flag: tuple(value) if isinstance(value, list) else value for flag, value in given.items()}
        train(check(GRPOConfig(**given), launched_processes()))
    finally:
        sampler.choose, grpo.batch = choose, batch
    if flags.get("strategy") is None:
        np.savez(Path(flags["output_dir"]) / "batches.npz", **written)
    return json.dumps(sorted(written))
