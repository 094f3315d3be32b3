# SPDX-License-Identifier: Apache-2.0
"""Generates samples of given prompts on the mesh and with the parameters of the network that is trained."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.data.examples import Line, LineTokenizer
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.runtime.engine import Engine
from sporeloom.tasks.rollouts import Rollouts
from sporeloom.train.config import Run
from sporeloom.train.samples import Sample

MAX_ROWS = 16
"""Maximum number of texts that are generated at the same time on a replica: each has a KV cache."""


class PromptSampler:
    """Continues the prompts of a run.

    Raises:
        ConfigError: a prompt has no room for a sample, or the model has no chat template.
    """

    def __init__(self, run: Run, engine: Engine, net: nn.Cell, reading: LineTokenizer):
        config = run.config
        self.tokenizer, self.seed = reading.tokenizer, config.seed
        self.prompts = reading.prompts(_lines(config.prompts(), config.sample_chat))
        longest = max(len(prompt.tokens) for prompt in self.prompts)
        if longest + config.sample_tokens > run.seq_len:
            raise ConfigError(
                f"--sample-prompts {config.sample_prompts}: the longest prompt has {longest} tokens, which with "
                f"--sample-tokens {config.sample_tokens} are more than --seq-len {run.seq_len}; give fewer"
            )
        dp = run.strategy.mesh.dp
        rows = min(-(-len(self.prompts) // dp), MAX_ROWS) * dp
        sampling = SamplingConfig(temperature=config.sample_temperature, seed=config.seed)
        self.rollouts = Rollouts(engine, run, net.model, self.tokenizer, rows, sampling, config.sample_tokens)

    def sample(self, step: int) -> list[Sample]:
        count = len(self.prompts)
        texts = self.rollouts.sample(self.prompts, range(count), range(step * count, (step + 1) * count))
        return [Sample(self.tokenizer.decode(t.tokens[: -1 if t.has_ended else None]), t.has_ended) for t in texts]


def _lines(prompts: Sequence[str], is_chat: bool) -> list[Line]:
    return [
        Line(f"--sample-prompts, line {number}", {"prompt": [{"role": "user", "content": text}] if is_chat else text})
        for number, text in enumerate(prompts, 1)
    ]
