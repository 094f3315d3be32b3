# SPDX-License-Identifier: Apache-2.0
"""Generate texts from texts, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sporeloom.data.tokenizer import Prompt, Tokenizer
from sporeloom.inference.config import GenerateJob
from sporeloom.inference.decoding import Decoding
from sporeloom.inference.draft_model import open_speculation
from sporeloom.inference.growing_text import GrowingText
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import load_model
from sporeloom.inference.requests import FinishReason, NewToken, Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import generate
from sporeloom.inference.speculation import Speculation
from sporeloom.inference.stopping import StopCondition, at_text, first_of, held_back
from sporeloom.inference.uncached import UncachedDecoder
from sporeloom.runtime.engine import Engine


@dataclass
class Completion:
    """The output of one prompt, growing until `finish_reason` is set."""

    prompt: str
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    """Log-probability of each token under the model itself."""
    text: str = ""
    """Text of the tokens, without the stop sequence."""
    finish_reason: FinishReason | None = None
    prefill_s: float = 0.0
    """Seconds from a free row to the first token."""
    decode_s: float = 0.0
    """Seconds of all further tokens."""
    growing: GrowingText | None = field(default=None, repr=False, compare=False)

    @property
    def time_per_token_s(self) -> float | None:
        """Mean seconds of a token after the first."""
        return self.decode_s / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


@dataclass(frozen=True)
class StopConditions:
    """Conditions that end a text.

    Args:
        stop_ids: tokens that end it, the end-of-document token among them; not part of the text.
        stop_texts: texts that end it; not part of it.
        rule: another rule.
    """

    tokenizer: Tokenizer
    stop_ids: Sequence[int]
    stop_texts: Sequence[str] = ()
    rule: StopCondition | None = None

    def at(self, text: str, known: int = 0) -> int | None:
        """Position where `text` ends before its end, if it does; not within its first `known` characters."""
        rules = [*([at_text(self.stop_texts)] if self.stop_texts else []), *([self.rule] if self.rule else [])]
        return first_of(*rules)(text, known) if rules else None

    def watch(self) -> Callable[[Sequence[int]], bool]:
        """A function for one text. It is called after each of its tokens with all of them, and returns whether the last one
        ends it."""
        text, known = GrowingText(self.tokenizer), 0
        has_rules, num_read = bool(self.stop_texts or self.rule), 0

        def is_finished(tokens: Sequence[int]) -> bool:
            nonlocal known, num_read
            if tokens[-1] in self.stop_ids:
                return True
            if not has_rules:
                return False
            for token in tokens[num_read:]:
                text.add(token)
            num_read = len(tokens)
            found = self.at(text.text, known) is not None
            known = text.num_settled
            return found

        return is_finished

    def add(self, completion: Completion, new: NewToken) -> str:
        """Add a token. Returns the text that is certain now: the possible beginning of a stop sequence waits."""
        if completion.tokens:
            completion.decode_s += new.seconds
        else:
            completion.prefill_s = new.seconds
        completion.tokens.append(new.token)
        completion.log_probabilities.append(new.log_probability)
        completion.finish_reason = new.finish_reason
        growing = completion.growing = completion.growing or GrowingText(self.tokenizer)
        known = growing.num_settled
        if not (new.finish_reason == "stop" and new.token in self.stop_ids):
            growing.add(new.token)
        text = growing.text
        end = self.at(text, known)
        if end is not None:
            text = text[:end]
        elif not new.finish_reason:
            text = text[: len(text) - held_back(text, self.stop_texts)]
        if not text.startswith(completion.text) and not new.finish_reason:
            return ""  # a tokenizer that reads the last tokens anew: wait until it settles
        added = text[len(completion.text) :] if text.startswith(completion.text) else ""
        completion.text = text
        return added


@dataclass(frozen=True)
class TextPiece:
    """New text of one prompt."""

    place: int
    """Index of the prompt among those given."""
    text: str
    completion: Completion


class Session:
    """A model with its graphs compiled, ready for prompts. `stop` may be changed between calls."""

    def __init__(
        self, engine: Engine, decoding: Decoding, stop: StopConditions, speculation: Speculation | None = None
    ):
        self.engine, self.decoding, self.stop, self.speculation = engine, decoding, stop, speculation

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on all devices together, and of the draft model's."""
        return self.decoding.cache_bytes + (self.speculation.drafter.cache_bytes if self.speculation else 0)

    def complete(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        max_new_tokens: int,
        streams: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts to their end, in the order given."""
        completions: dict[int, Completion] = {}
        for piece in self.stream(prompts, sampling, max_new_tokens, streams):
            completions[piece.place] = piece.completion
        return [completions[place] for place in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        max_new_tokens: int | Sequence[int],
        streams: Sequence[int] | None = None,
    ) -> Iterator[TextPiece]:
        """Yield the text of all prompts as it is generated. The possible beginning of a stop sequence waits for
        the next token.

        Args:
            prompts: texts or token ids.
            max_new_tokens: of every prompt, or of each.
            streams: what sets the random numbers of each prompt apart; without it, its place.
        """
        stop = self.stop
        sampler = Sampler(sampling, stop.stop_ids, stop.tokenizer.vocab_size)
        ids = [list(prompt.tokens) for prompt in prompts]
        most = [max_new_tokens] * len(ids) if isinstance(max_new_tokens, int) else max_new_tokens
        self.decoding.prepare([len(prompt) for prompt in ids], max(most, default=0))
        if self.speculation:
            self.speculation.drafter.prepare()
        requests = [
            Request(tokens, limit, sampler, stop.watch(), stream)
            for tokens, limit, stream in zip(ids, most, streams or range(len(ids)), strict=True)
        ]
        completions = [Completion(prompt.text) for prompt in prompts]
        for new in generate(self.decoding, self.engine, requests, self.speculation):
            completion = completions[new.request]
            yield TextPiece(new.request, stop.add(completion, new), completion)


def open_session(job: GenerateJob, engine: Engine) -> Session:
    """Open the checkpoint's model for the job's prompts."""
    config, drafts = job.config, None
    if config.no_cache:
        net = load_model(config.checkpoint, job.family, job.model, job.strategy, weights=config.weights)
        decoding: Decoding = UncachedDecoder(engine, net, job.model, job.num_rows)
    else:
        shape = (job.num_rows, job.num_slots)
        of = config.checkpoint, job.family, job.model, job.strategy
        net = load_model(
            *of, shape, config.weights, num_drafts=config.num_drafts, kv_cache=config.kv_cache, drafts=config.has_mtp
        )
        decoding = caches = cached(engine, net, job.model, *shape, num_drafts=config.num_drafts)
        drafts = open_speculation(config, job.draft, engine, caches)
    return Session(engine, decoding, StopConditions(job.tokenizer, job.stop_ids, config.stop, job.ending), drafts)
