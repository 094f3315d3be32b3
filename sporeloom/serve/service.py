# SPDX-License-Identifier: Apache-2.0
"""The model behind the server: a loop that every rank of the job runs, each with a scheduler.

One rank has the HTTP server, in another thread. Its requests go into a queue; before each step the rank broadcasts them,
so that all schedulers see one order.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspore import nn

from sporeloom.checkpoint.adapters import ranks_of_several
from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import first_line
from sporeloom.core.log import LogBudget, counted, milestone
from sporeloom.inference.adapter_memory import AdapterMemory
from sporeloom.inference.draft_model import open_speculation
from sporeloom.inference.mixed import cached, takes
from sporeloom.inference.model import load_model
from sporeloom.inference.prefix_cache import PrefixCache, prefix_cache
from sporeloom.inference.prefix_store import BlockStore, computation_hash
from sporeloom.inference.requests import Event, Failure, InternalError, PromptEmbedding, Request
from sporeloom.inference.scheduler import Scheduler
from sporeloom.models.slots import num_slots_for
from sporeloom.runtime.engine import Engine
from sporeloom.serve.adapter_slots import AdapterLoad, AdapterSlots, ModelGoneError
from sporeloom.serve.config import CHUNK, MIXED_CHUNK, ServeJob
from sporeloom.serve.fair_queue import FairQueue
from sporeloom.serve.generation import GenerationRequest, broadcast_form, scheduled
from sporeloom.serve.prefix_cache_flags import DEFAULT_DIR_GB, GB, MIN_BLOCKS

HEARTBEAT_S = 5.0
"""Maximum seconds that ranks wait for each other without requests: far below every time-out of a collective."""

State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class ServiceFailure:
    """Replaces further events: the reason why there are none."""

    reason: str


Notify = Callable[[Event | ServiceFailure], None]


@dataclass(eq=False)
class _Open:
    """A text that waits or is generated, on the rank with the server."""

    wanted: GenerationRequest
    notify: Notify
    ticket: int


@dataclass(frozen=True)
class Load:
    """Load of the service."""

    running: int
    waiting: int
    used_slots: float
    """Fraction of the cache's slots that hold tokens."""
    reused_tokens: int
    drafts: int = 0
    """Number of drafts that were verified."""
    drafted: int = 0
    """Number of tokens in them."""
    accepted: int = 0
    """Number of drafted tokens that were right."""


class Service:
    """Generates texts with a checkpoint's model, on request.

    `submit`, `cancel` and `stop` may be called from any thread of the rank with the server; `run` is the loop.
    """

    def __init__(self, job: ServeJob):
        self.job = job
        self.state: State = "loading"
        self.progress = "starting"
        """Current step of loading, for messages."""
        self.failure = ""
        self.load = Load(0, 0, 0.0, 0)
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._queue = FairQueue[_Open]()  # seen by the loop, and without a row
        self._queued: dict[int, _Open] = {}  # the same by their tickets
        self._open: dict[int, _Open] = {}
        self._numbers: dict[int, int] = {}  # ticket -> number in the schedulers
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._waiting: Counter[int] = Counter()  # client -> its texts that were submitted, and have no row yet
        self._stop_at: float | None = None
        self._log = LogBudget()
        self._slots = AdapterSlots(job.models, job.num_reserved)
        self._loads: deque[AdapterLoad] = deque()  # broadcast, and not done yet

    # Called by the server

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return self.load.waiting + self._waiting.total()

    def waiting_clients(self) -> dict[int, int]:
        """Numbers of texts that wait, by the numbers of their clients."""
        with self._lock:
            return {client: count for client, count in self._waiting.items() if count > 0}

    def submit(self, wanted: GenerationRequest, notify: Notify) -> int:
        """Queue a text; `notify` is called with its events, from the loop's thread. Returns a ticket for `cancel`."""
        ticket = next(self._tickets)
        if self.failure:
            notify(ServiceFailure(self.failure))
        else:
            self._book_waiting(wanted.client, 1)
            self._inbox.put(("submit", _Open(wanted, notify, ticket)))
        return ticket

    def _book_waiting(self, client: int, more: int) -> None:
        with self._lock:
            self._waiting[client] += more

    def cancel(self, ticket: int) -> None:
        """Cancel a text; its row is free before the next step."""
        self._inbox.put(("cancel", ticket))

    def load_adapter(self, load: AdapterLoad) -> None:
        """Put adapters into a free slot before the next step; `load.notify` is called with the outcome."""
        if self.failure:
            load.notify(self.failure)
        else:
            self._inbox.put(("load", load))

    def unload_adapter(self, number: int) -> None:
        """Free the slot of adapters once the texts that have them are done."""
        self._inbox.put(("unload", number))

    def stop(self, timeout_s: float) -> None:
        """Let open texts finish for this long, then leave `run`."""
        self._inbox.put(("stop", timeout_s))

    def fail(self, reason: str) -> None:
        """Inform all waiting clients that nothing will follow."""
        self.state, self.failure = "failed", reason
        waiting = []
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._inbox.get_nowait())
        for load in [*self._loads, *(value for kind, value in waiting if kind == "load")]:
            load.notify(reason)
        for each in [
            *self._open.values(),
            *self._queued.values(),
            *(value for kind, value in waiting if kind == "submit"),
        ]:
            each.notify(ServiceFailure(reason))

    # The loop

    def open(self) -> None:
        """Load and compile; every rank does.

        Raises:
            ConfigError: blocks on disk of a device whose numbers may differ between machines; sizes without room for one.
        """
        job, config = self.job, self.job.config
        self.engine = Engine.start(job.strategy)
        if config.prefix_cache_dir and self.engine.target != "CPU":
            raise ConfigError(f"--prefix-cache-dir: only on a CPU, not on {self.engine.target}; leave it out")
        self.engine.backend.on_lost_rank(self._lost)
        shape = (job.num_rows, num_slots_for(job.max_model_len))
        self._say("loading the weights")
        adapters, pooling, num_drafts = job.adapter_slots, config.embeddings, config.num_drafts
        of = config.checkpoint, job.family, job.model, job.strategy
        net = load_model(
            *of, shape, config.weights, adapters, num_drafts, config.kv_cache, pooling is not None, config.has_mtp
        )
        computation = self._computation(net) if config.prefix_cache_dir else ""
        self._adapter_memory = AdapterMemory(self.engine, net, ranks_of_several(adapters))
        chunk = config.prefill_chunk or (MIXED_CHUNK if takes(net, job.num_rows) else CHUNK)
        decoding = cached(self.engine, net, job.model, *shape, chunk, num_drafts, pooling)
        steps = list(decoding.shapes())
        for done, (what, compile_step) in enumerate(steps, 1):
            self._say(f"compiling {done} of {len(steps)}: {what}")
            compile_step()
        self.decoding, drafts = decoding, open_speculation(config, job.draft, self.engine, decoding)
        if drafts:
            self._say("compiling drafts")
            drafts.drafter.prepare()
        bytes_of_token = decoding.cache_bytes // (shape[0] * shape[1])
        cache = prefix_cache(decoding, bytes_of_token, int(config.prefix_cache_gb * GB))
        if cache is None and config.prefix_cache_gb and decoding.reusable:
            raise ConfigError(f"--prefix-cache-gb {config.prefix_cache_gb:g}: no room for a block; give more, or 0")
        if cache is not None and config.prefix_cache_dir:
            cache = self._with_store(cache, config.prefix_cache_dir, computation)
        self.scheduler = Scheduler(decoding, self.engine, cache, drafts)
        gc.collect()
        gc.freeze()  # the loaded objects stay: a garbage collection over them would delay everything by half a second
        self.state, self.progress = "ready", ""

    def _computation(self, net: nn.Cell) -> str:
        """Hash of what blocks of the prefix cache depend on."""
        self._say("hashing the weights")
        job = self.job
        flags = ("weights", "kv_cache", "prefill_chunk", "num_drafts", "embeddings")
        more = {name: getattr(job.config, name) for name in flags}
        shape = (job.num_rows, job.max_model_len)
        return computation_hash(net, {**more, "model": [job.family, repr(job.model)], "shape": shape})

    def _with_store(self, cache: PrefixCache, folder: Path, computation: str) -> PrefixCache:
        """The prefix cache with blocks on disk.

        Raises:
            ConfigError: no room for two blocks.
        """
        keys, num_models = self.job.api_keys, len(self.job.models)

        def owner_key(owner: Any) -> str | None:
            slot, adapter, client, salt = (
                owner  # numbers of adapters that are loaded at runtime differ between processes
            )
            return json_text([slot, keys[client] if keys else "", salt]) if adapter < num_models else None

        like = self.decoding.read_slots(0, 0, cache.block)
        num_bytes = int((self.job.config.prefix_cache_dir_gb or DEFAULT_DIR_GB) * GB)
        if num_bytes < MIN_BLOCKS * sum(each.nbytes for each in like):
            raise ConfigError("--prefix-cache-dir-gb: it has no room for two blocks; give more")
        cache.store = BlockStore(folder, num_bytes, computation, owner_key, like)
        return cache

    def close(self) -> None:
        """Store what later servers may reuse."""
        if self.scheduler.cache:
            self.scheduler.cache.close()

    def _say(self, progress: str) -> None:
        self.progress = progress
        if self.engine.is_log_rank:
            milestone(progress)

    def _lost(self, line: str) -> None:
        self.fail(line)
        time.sleep(1.0 if self._open else 0.0)  # the server's thread informs its clients meanwhile

    def run(self) -> None:
        """Generate texts until the service is stopped."""
        source = self.job.strategy.mesh.first_rank_of_last_stage
        while True:
            commands, opened = self._collect() if self.engine.is_log_rank else ([], deque[_Open]())
            for kind, value in self.engine.broadcast_value(commands, source):
                if kind == "submit":
                    self._submit(value, opened)
                elif kind == "cancel":
                    self._cancel(value)
                elif kind == "load":
                    self._load(value, source)
                else:
                    return
            events = [] if self.scheduler.is_idle else self.scheduler.step()
            self._measure()  # before clients are notified: whoever has a token sees its row counted
            for event in events:
                self._deliver(event)

    def _collect(self) -> tuple[list[Any], deque[_Open]]:
        """Commands of a step: texts to cancel, and those that get the free rows; and the latter themselves."""
        cancelled: list[Any] = []
        while True:
            idle = self.scheduler.is_idle and not cancelled and not self._queue and not self._loads
            try:
                kind, value = self._inbox.get(timeout=self._patience()) if idle else self._inbox.get_nowait()
            except queue.Empty:
                break
            if kind == "stop":
                self.state, self._stop_at = "draining", time.monotonic() + value
            elif kind == "submit":
                self._enqueue(value)
            elif kind == "load":
                self._place(value)
            elif kind == "unload":
                self._slots.retire(value)
            elif value in self._queued:
                self._queue.remove(text := self._queued.pop(value))
                self._book_waiting(text.wanted.client, -1)
            elif value in self._numbers:
                cancelled.append(["cancel", self._numbers[value]])
        opened = self._next_texts(len(cancelled))
        commands = cancelled + [["load", each.command] for each in self._loads]
        commands += [["submit", broadcast_form(each.wanted)] for each in opened]
        is_done = not commands and self.scheduler.is_idle
        if self._stop_at is not None and (is_done or time.monotonic() > self._stop_at):
            if not is_done:
                milestone(f"{counted(len(self._open), 'request', 'requests')} aborted")
            self.fail("the server is stopping")
            for each in opened:
                each.notify(ServiceFailure(self.failure))
            return [["stop", None]], deque()
        return commands, opened

    def _enqueue(self, text: _Open) -> None:
        """Queue a text, unless its adapters are gone."""
        if self._slots.slot_of(text.wanted.adapter) is None:
            self._book_waiting(text.wanted.client, -1)
            text.notify(Failure(-1, ModelGoneError()))
            return
        self._queued[text.ticket] = text
        self._queue.put(text, text.wanted.client, text.wanted.priority)

    def _place(self, load: AdapterLoad) -> None:
        """Choose a slot that no text computes with."""
        used = {each.wanted.adapter for each in (*self._open.values(), *self._queued.values())}
        slot = self._slots.take(load.number, used)
        if slot is None:
            load.notify("busy")
        else:
            load.slot = slot
            self._loads.append(load)

    def _load(self, told: dict[str, Any], source: int) -> None:
        """Replace the adapters in a slot, on every rank."""
        mine = self._loads[0] if self._loads else None
        self._slots.put(told["number"], told["slot"], told["vocab_size"])
        self._adapter_memory.write(told["slot"], told["ranks"], mine.adapter if mine else None, source)
        if mine:
            self._loads.popleft().notify(None)

    def _next_texts(self, num_cancelled: int) -> deque[_Open]:
        """Take the texts of the queue for which there are rows, some of which are free once texts are cancelled."""
        scheduler = self.scheduler
        rows = scheduler.decoding.num_rows + num_cancelled - scheduler.num_running - scheduler.num_waiting
        taken = deque(self._queue.pop() for _ in range(min(rows, len(self._queue))))
        for each in taken:
            del self._queued[each.ticket]
        return taken

    def _patience(self) -> float:
        return HEARTBEAT_S if self._stop_at is None else 0.01

    def _submit(self, told: dict[str, Any], opened: deque[_Open]) -> None:
        """Queue the broadcast requests; the rank with the server knows the clients."""
        mine = opened.popleft() if opened else None
        try:
            number = self.scheduler.submit(self._request(told, mine))
        except Exception as error:  # on every rank, as all make the same of it; the loop is for all requests
            if mine:
                self._book_waiting(mine.wanted.client, -1)
                self._log.log("failed", f"a request failed: {type(error).__name__}: {first_line(error)[:200]}")
                mine.notify(Failure(-1, InternalError()))
            return
        if mine:
            self._open[number], self._numbers[mine.ticket] = mine, number
            self._book_waiting(mine.wanted.client, -1)

    def _request(self, told: dict[str, Any], mine: _Open | None) -> Request:
        number = told["adapter"]
        slot, vocab_size = self._slots.slot_of(number) or 0, self._slots.vocab_size(number)
        return scheduled(told, slot, vocab_size, mine.wanted if mine else None)

    def _cancel(self, number: int) -> None:
        self.scheduler.cancel(number)
        if mine := self._open.pop(number, None):
            del self._numbers[mine.ticket]

    def _deliver(self, event: Event) -> None:
        mine = self._open.get(event.request)
        if mine is None:
            return
        if isinstance(event, Failure | PromptEmbedding) or event.finish_reason:
            del self._open[event.request], self._numbers[mine.ticket]
        mine.notify(event)

    def _measure(self) -> None:
        if self.engine.is_log_rank:
            table, scheduler = self.decoding.slot_table, self.scheduler
            used = float(table.lengths.sum()) / (table.capacity * table.num_rows)
            drafted = scheduler.speculation
            counts = (drafted.num_drafts, drafted.drafted, drafted.accepted) if drafted else (0, 0, 0)
            self.load = Load(scheduler.num_running, scheduler.num_waiting, used, scheduler.reused_tokens, *counts)
