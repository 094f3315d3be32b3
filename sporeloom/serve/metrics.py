# SPDX-License-Identifier: Apache-2.0
"""The metrics at /metrics, with vLLM's names behind another prefix, so that its dashboards need one replacement."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sporeloom.inference.requests import NewToken
from sporeloom.serve.service import Service

PREFIX = "sporeloom:"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)


@dataclass
class Timing:
    """Times of the events of a text."""

    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self, service: Service, model: str):
        self.registry = CollectorRegistry()
        self.names = {"model_name": model, "engine": "0"}
        self._service = service
        gauges = {
            "num_requests_running": ("Running sequences.", lambda: service.load.running),
            "num_requests_waiting": ("Sequences that wait for a row.", lambda: service.num_waiting),
            "kv_cache_usage_perc": (
                "Fraction of the KV cache that holds tokens, 0 to 1.",
                lambda: service.load.used_slots,
            ),
            "spec_decode_draft_acceptance_rate": (
                "Fraction of drafted tokens that were right, 0 to 1.",
                lambda: service.load.accepted / max(1, service.load.drafted),
            ),
        }
        for name, (text, read) in gauges.items():
            Gauge(PREFIX + name, text, [*self.names], registry=self.registry).labels(**self.names).set_function(read)
        self.prompt_tokens = self._counter("prompt_tokens", "Prefilled tokens.")
        self.generated = self._counter("generation_tokens", "Generated tokens.")
        self.queried = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in free rows and the prefix cache."
        )
        self.reused = self._counter("prefix_cache_hits", "Prompt tokens found in a free row or the prefix cache.")
        self.ended = Counter(
            f"{PREFIX}request_success", "Finished sequences.", [*self.names, "finished_reason"], registry=self.registry
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from request to first token.", SECONDS
        )
        self.between = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of a sequence.", SECONDS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds per output token of a sequence.", SECONDS
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "Seconds from request to last token.", SECONDS)
        self.queued = self._histogram("request_queue_time_seconds", "Seconds from request to a free row.", SECONDS)
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Seconds from a free row to the first token.", SECONDS
        )
        self.decode = self._histogram("request_decode_time_seconds", "Seconds from first to last token.", SECONDS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.length = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.params_n = self._histogram("request_params_n", "The n of requests.", CHOICES)
        self.params_max = self._histogram("request_params_max_tokens", "The max_tokens of requests.", TOKENS)
        self._reused_before = 0
        self._drafting = [
            (self._counter("spec_decode_num_drafts", "Verified drafts."), "drafts"),
            (self._counter("spec_decode_num_draft_tokens", "Drafted tokens."), "drafted"),
            (self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were right."), "accepted"),
        ]
        self._drafted_before = dict.fromkeys(("drafts", "drafted", "accepted"), 0)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, [*self.names], registry=self.registry).labels(**self.names)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(PREFIX + name, text, [*self.names], registry=self.registry, buckets=buckets)
        return made.labels(**self.names)

    def asked(self, prompt_tokens: int, n: int, max_tokens: int) -> None:
        """Record a new request."""
        self.prompt_tokens.inc(prompt_tokens)
        self.queried.inc(prompt_tokens)
        self.prompt_length.observe(prompt_tokens)
        self.params_n.observe(n)
        self.params_max.observe(max_tokens)

    def embedded(self, prompt_tokens: int) -> None:
        """Record a text to embed."""
        self.prompt_tokens.inc(prompt_tokens)
        self.prompt_length.observe(prompt_tokens)

    def token(self, timing: Timing, new: NewToken) -> None:
        """Record a token."""
        now = time.perf_counter()
        self.generated.inc()
        timing.tokens += 1
        if timing.first is None:
            timing.first = now
            self.first_token.observe(now - timing.started)
            self.prefill.observe(new.seconds)
            self.queued.observe(max(0.0, now - timing.started - new.seconds))
        else:
            self.between.observe(now - timing.last)
        timing.last = now

    def end(self, timing: Timing, reason: str) -> None:
        """Record the end of a sequence: stop, length, abort or error."""
        self.ended.labels(**self.names, finished_reason=reason).inc()
        self.whole.observe(time.perf_counter() - timing.started)
        self.length.observe(timing.tokens)
        if timing.first is not None:
            self.decode.observe(timing.last - timing.first)
            if timing.tokens > 1:
                self.per_token.observe((timing.last - timing.first) / (timing.tokens - 1))

    def text(self) -> bytes:
        """Format for Prometheus."""
        reused = self._service.load.reused_tokens
        self.reused.inc(reused - self._reused_before)
        self._reused_before = reused
        for counter, name in self._drafting:
            count = getattr(self._service.load, name)
            counter.inc(count - self._drafted_before[name])
            self._drafted_before[name] = count
        return generate_latest(self.registry)
