# SPDX-License-Identifier: Apache-2.0
"""Common parts of the reinforcement learning tasks, which sample texts, score them, and train on them."""

from __future__ import annotations

import base64
import io
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.align.reward_server import ServerLimits, is_url
from sporeloom.align.rewards import Reward, load_reward, rewards_of
from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import Batch
from sporeloom.data.examples import PromptLine, example_batch
from sporeloom.evaluation.reward import PREFIX, program_reward
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.nn.objectives import Objective, Policy, ValueLoss
from sporeloom.parallel.step import TrainStep
from sporeloom.tasks.judges import Judge, Reference
from sporeloom.tasks.one_rank import from_log_rank
from sporeloom.tasks.rollouts import Rollouts, SampledText, ToolUse
from sporeloom.tasks.tool_rollouts import ToolRollouts
from sporeloom.tasks.tuning import Tuning

ARRAYS = ("rewards", "old", "reference", "sampled", "values")
"""Arrays of a round, named as in `Round`."""


@dataclass
class Round:
    """The texts of one round, with the values that updates need."""

    number: int
    """Number of the round, counted from 0."""
    texts: list[SampledText]
    rewards: NDArray[np.float64]
    """Reward of each text."""
    old: NDArray[np.float32]
    """(B, T): log-probabilities of the tokens when they were sampled, as training computes them, where they are
    needed."""
    reference: NDArray[np.float32]
    """(B, T): log-probabilities under the reference, computed likewise."""
    sampled: NDArray[np.float32]
    """(B, T): log-probabilities as sampling computed them."""
    values: NDArray[np.float32]
    """(B, T): values of the critic at that time."""


class PolicyTask(Tuning):
    """A round samples texts, and some steps train on them. Subclasses define `loss`, `flags` and `judged`."""

    objective: type[Objective]
    flags: tuple[str, ...] = ()
    """Flags of the configuration that graphs and resumed runs depend on."""

    is_ahead = False
    uses_tools = False
    """Whether texts are conversations with tools."""
    prompts: list[PromptLine]
    rollouts: Rollouts | ToolRollouts
    reference: Reference | None = None
    judge: Judge | None = None
    collected: Round | None = None

    def data_state(self) -> dict[str, Any]:
        return {**super().data_state(), **self._values("temperature", "max_completion_length", "reward", *self.flags)}

    def _values(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in names}

    def open_data(self) -> None:
        config = self.config
        self.functions = {name: _reward(name, config) for name in config.reward}
        room = self.run.seq_len - config.max_completion_length
        every = self.reading().prompts(self.run.data)
        self.prompts = [prompt for prompt in every if len(prompt.tokens) <= room]
        self.num_samples = len(self.prompts)
        dropped = len(every) - len(self.prompts)
        if not self.prompts:
            raise ConfigError(
                f"{config.data}: all prompts are longer than the {room} tokens that --seq-len "
                f"{self.run.seq_len} leaves besides --max-completion-length {config.max_completion_length}"
            )
        self.text = f"{len(self.prompts):,} prompts" + (f", {dropped:,} dropped, too long" if dropped else "")

    @property
    def prompts_per_round(self) -> int:
        count: int = self.config.batch_size // self.config.texts_per_prompt
        return count

    @property
    def draws_per_round(self) -> int:
        """Number of times that a round takes the next prompts."""
        return 1

    def describe(self) -> str:
        rounds = -(-self.config.steps // self.config.updates_per_round) * self.draws_per_round
        return f"{self.config.data}: {self.text}; {rounds * self.prompts_per_round / self.num_samples:.2f} epochs"

    def begin(self, step: TrainStep, steps_done: int) -> None:
        config = self.config
        sampling = SamplingConfig(temperature=config.temperature, seed=config.seed)
        self.rollouts = Rollouts(
            *(self.engine, self.run, self.net.model, self.tokenizer),
            *(config.batch_size, sampling, config.max_completion_length),
        )
        if self.config.has_reference:
            self.reference = Reference(self.engine, self.run, self.net, Policy(temperature=config.temperature))
        if config.reward_model:
            self.judge = Judge(self.engine, config.reward_model)

    def shaped_inputs(self, step: int) -> list[NDArray[Any]]:
        rows, length = self.run.sizes.of_step(step)
        ints, floats = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
        return self.with_dropout_keys(step, [ints, ints, ints, *[floats] * (1 + self.objective.num_inputs)])

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        number, update = divmod(step, self.config.updates_per_round)
        if self.collected is None or self.collected.number != number:
            self.collected = self.collect(number)
        found = self.collected
        batch = self.texts(found.texts)
        weights, advantages, more = self.judged(found, batch.loss_weights)
        is_first = np.full(batch.tokens.shape, update == 0, np.float32)
        policy = [advantages, found.old, found.reference, is_first]
        return [*batch._replace(loss_weights=weights), *(a.astype(np.float32) for a in (*policy, *more))]

    @abstractmethod
    def judged(
        self, found: Round, mask: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[Any], Sequence[NDArray[Any]]]:
        """Loss weights and advantages (B, T) of the tokens of a round, and further inputs of the objective."""

    def texts(self, texts: Sequence[SampledText]) -> Batch:
        """Texts as a batch with a mask for weights."""
        return example_batch([[text.example(self.prompts)] for text in texts], self.run.seq_len)

    def collect(self, number: int) -> Round:
        """Sample and reward the texts of a round. All ranks get the same."""
        self.engine.refresh(self.net, self.net.parallel_report)
        texts, rewards = self.rewarded(number)
        batch = self.texts(texts)
        reference = np.zeros_like(batch.loss_weights)
        if self.reference:
            reference = self.evaluated(self.reference.net, batch) * batch.loss_weights
        sampled = np.zeros_like(batch.loss_weights)
        for row, text in enumerate(texts):
            sampled[row, batch.loss_weights[row] > 0] = text.log_probs
        old, values = self.before(batch)
        return Round(number, texts, rewards, sampled if old is None else old, reference, sampled, values)

    def rewarded(self, draw: int) -> tuple[list[SampledText], NDArray[np.float64]]:
        """Sample texts for as many prompts as a round has, those of `draw` in the order of prompts, and reward them."""
        chosen = self.samples(draw, self.prompts_per_round)
        numbers = np.repeat(chosen, self.config.texts_per_prompt)
        first = draw * len(numbers)
        texts = self.rollouts.sample(self.prompts, numbers.tolist(), range(first, first + len(numbers)))
        return texts, self.rewards(texts)

    def before(self, batch: Batch) -> tuple[NDArray[np.float32] | None, NDArray[np.float32]]:
        """Log-probabilities of the tokens before the first update, as training computes them, where they are
        needed; and the critic's values, if there is one."""
        mask = batch.loss_weights
        return self.evaluated(self.net, batch) * mask if self.config.updates_per_round > 1 else None, 0 * mask

    def rewards(self, texts: Sequence[SampledText]) -> NDArray[np.float64]:
        """Reward of each text, summed over all sources of rewards."""
        values = np.zeros(len(texts))
        for name, function in self.functions.items():
            # One rank calls the functions, which may not be deterministic, and broadcasts the results.
            told = self._told(name, partial(self._from_function, name, function, texts))
            if isinstance(told, str):
                raise ConfigError(told)
            values += told
        if self.judge:
            values += self.judge.rewards([text.example(self.prompts) for text in texts], self.run.seq_len)
        return values

    def _told(self, name: str, compute: Callable[[], list[float] | str]) -> Any:
        """Result of a reward function, on all ranks. Users' own may need the main thread, for signals."""
        is_own = is_url(name) or name.startswith(PREFIX)
        return from_log_rank(self.engine, compute, in_main_thread=not is_own)

    def _from_function(self, name: str, function: Reward, texts: Sequence[SampledText]) -> list[float] | str:
        prompts = [self.prompts[text.prompt] for text in texts]
        completions = [self.tokenizer.decode(text.completion) for text in texts]
        conversations = [text.tools.messages for text in texts if text.tools] or None
        asked, lines = [prompt.text for prompt in prompts], [prompt.columns for prompt in prompts]
        try:
            return [float(value) for value in rewards_of(name, function, asked, completions, lines, conversations)]
        except ConfigError as error:
            return error.problems[0]

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        assert counts is not None and self.collected
        found, rewards = self.collected, self.collected.rewards
        texts, lengths = found.texts, np.array([text.num_sampled for text in found.texts])
        tokens, trained = int(lengths.sum()), int(lengths[self.are_trained(texts)].sum())
        told = dict(zip(self.objective.metrics, map(float, counts), strict=True))
        told |= {name: told[name] / max(trained, 1) for name in (*Policy.metrics, *ValueLoss.metrics) if name in told}
        if found.old is not found.sampled:
            told["sampling_difference"] = float(np.abs(found.old - found.sampled).sum() / tokens)
        groups = rewards.reshape(-1, self.config.texts_per_prompt)
        told |= {
            "reward": float(rewards.mean()),
            "reward_std": float(groups.std(1).mean() if self.config.texts_per_prompt > 1 else rewards.std()),
            "completion_length": tokens / len(texts),
            "ended": sum(text.has_ended for text in texts) / len(texts),
        }
        meaningless = {"kl": not self.config.has_reference, "sampling_difference": self.config.temperature != 1}
        return {name: value for name, value in told.items() if not meaningless.get(name)}

    def are_trained(self, texts: Sequence[SampledText]) -> NDArray[np.bool_]:
        """Whether each text is in the loss."""
        return np.ones(len(texts), np.bool_)

    def state(self) -> dict[str, Any]:
        """The round in progress, if it is not over."""
        found = self.collected
        if found is None or self.config.updates_per_round == 1:
            return {}
        arrays = {name: getattr(found, name) for name in ARRAYS}
        tokens = [text.tokens for text in found.texts]
        arrays |= {"tokens": np.concatenate(tokens), "lengths": np.asarray([len(text) for text in tokens])}
        arrays |= {"prompts": np.asarray([text.prompt for text in found.texts])}
        arrays |= {"has_ended": np.asarray([text.has_ended for text in found.texts])}
        if self.uses_tools:
            arrays |= {"are_sampled": np.concatenate([text.are_sampled for text in found.texts])}
            arrays |= {"tools": np.asarray([_counts(text) for text in found.texts])}
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)
        return {"round": found.number, "npz": base64.b64encode(packed.getvalue()).decode()}

    def restore(self, state: dict[str, Any]) -> None:
        if "round" not in state:
            return
        arrays = dict(np.load(io.BytesIO(base64.b64decode(state["npz"]))))
        tokens = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
        uses: list[ToolUse | None] = [None] * len(tokens)
        if self.uses_tools:
            sampled = np.split(arrays["are_sampled"], np.cumsum(arrays["lengths"])[:-1])
            counts = zip(sampled, arrays["tools"].tolist(), strict=True)
            uses = [ToolUse(tuple(mask.tolist()), start, [], *more) for mask, (start, *more) in counts]
        texts = [
            SampledText(int(prompt), ids.tolist(), [], bool(has_ended), use)
            for prompt, ids, has_ended, use in zip(arrays["prompts"], tokens, arrays["has_ended"], uses, strict=True)
        ]
        self.collected = Round(state["round"], texts, *(arrays[name] for name in ARRAYS))


def _counts(text: SampledText) -> tuple[int, int, int, int]:
    """Numbers of a conversation's `ToolUse`."""
    assert text.tools
    return text.tools.start, text.tools.num_turns, text.tools.num_calls, text.tools.num_failed


def _reward(name: str, config: Any) -> Reward:
    if name.startswith(PREFIX):
        return program_reward(name)
    return load_reward(name, ServerLimits(config.reward_timeout_s, config.reward_retries))
