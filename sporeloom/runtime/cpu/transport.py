# SPDX-License-Identifier: Apache-2.0
"""Tagged messages between the processes of one machine, and the collectives built on them.

Sends never wait; receives have a time-out that names the missing message. When a process disappears unexpectedly,
every other process reports it and exits, so that no job hangs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from sporeloom.core.lines import first_line
from sporeloom.runtime.cpu.meeting_place import MeetingPlace
from sporeloom.runtime.trace import TRACE, now

RECEIVE_TIMEOUT_S = 600.0
GOODBYE_S, GOODBYE_LOOKS = 0.3, 6
LINGER_MS = 5000
SMALL_BYTES = 1 << 16  # up to here one exchange of full arrays is faster than two of slices
NUMBERS = "biufc"  # kinds of NumPy dtypes that a message may hold, besides bfloat16
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # not by name, which MindSpore also registers

Array = NDArray[Any]
_IN = "in "
WATCHDOG_S = 120.0
_HELLO, _STEP, _BYE, _LOST, _WHERE, _VALUE, _ARRAY = "hello", "step", "bye", "lost", "where", "value", "array"


class TransportError(RuntimeError):
    """A message did not arrive, or does not match."""


class Transport:
    """Connections of this rank to all other ranks of `job`, a name that only they share.

    A message has two frames: a header in JSON, `[kind, source, tag, dtype, shape]`, and a body: the bytes of an array or
    a value in JSON. Content is never executed; messages that do not parse are dropped with one line. Sockets are in a
    folder that only their owner may enter, and only until all ranks are connected.

    Raises:
        ConfigError: another user owns that folder, or another running job has this name.
    """

    def __init__(self, rank: int, size: int, job: str):
        self.rank, self.size = rank, size
        self.last_steps: dict[int, int | None] = dict.fromkeys(range(size))
        self.on_lost: Callable[[str], None] = lambda line: None
        """Called with one line when a peer is lost, before this process exits."""
        self.watchdog_s = WATCHDOG_S
        """Seconds in a collective after which every rank reports its position; see `watched`."""
        self._doing, self._since, self._told_at = "before its first collective", time.monotonic(), -math.inf
        self._step: int | None = None
        self.communication_s = 0.0
        """Seconds in watched messages so far."""
        self._inbox: dict[tuple[int, str], queue.Queue[Any]] = {}
        self._inbox_lock = threading.Lock()
        self._absent = set(range(size)) - {rank}  # peers that have not connected yet
        self._left: set[int] = set()  # peers that closed gracefully
        self._closing, self._exiting = False, threading.Event()
        self._closer: threading.Thread | None = None
        self._losing = threading.Lock()
        self._lock = threading.Lock()
        self._place = MeetingPlace(job, rank)
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.bind(f"ipc://{self._place.socket(rank)}")
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        for peer in sorted(self._absent):
            self._connect(peer)
        if not self._absent:
            self._place.leave()  # no peer will connect
        threading.Thread(target=self._receive_loop, daemon=True).start()

    def _connect(self, peer: int) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)  # never block a sender: in 1F1B both sides send before they receive
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(f"ipc://{self._place.socket(peer)}")
        self._peers[peer] = socket
        self._post(peer, _HELLO)
        threading.Thread(target=self._watch, args=(peer, monitor), daemon=True).start()

    def _watch(self, peer: int, monitor: Any) -> None:
        try:
            recv_monitor_message(monitor)
        except zmq.ZMQError:
            return  # this transport is closing
        finally:
            monitor.close()
        for _ in range(
            GOODBYE_LOOKS
        ):  # a goodbye that came before may still wait to be read, if this process had no turn
            if self._closing or peer in self._left:
                return
            time.sleep(GOODBYE_S / GOODBYE_LOOKS)
        self._lose(peer)

    def _lose(self, peer: int) -> None:
        """Report that `peer` is lost to the other ranks, which might otherwise name this rank, and exit.

        Ignored if it or this rank has closed gracefully.
        """
        if self._closing or peer in self._left:
            return
        if not self._losing.acquire(blocking=False):
            return  # another thread is handling it
        step = self.last_steps[peer]
        where = "before its first step" if step is None else f"its last step was {step}"
        line = f"rank {peer} is gone ({where}); ending this job"
        # The stream of the process: an evaluation may have redirected the other one.
        print(f"rank {self.rank}: {line}", file=sys.__stderr__, flush=True)
        self._place.leave()
        for other in self._peers.keys() - {peer}:
            self._post(other, _LOST, str(peer))
        self.on_lost(line)
        time.sleep(GOODBYE_S)
        os._exit(1)  # other threads wait in C++ for messages that cannot arrive

    def _receive_loop(self) -> None:
        while True:
            try:
                frames = self._pull.recv_multipart(copy=False)
            except zmq.ZMQError:  # this transport is closing
                self._pull.close()
                return
            try:
                self._take(frames)
            except Exception as error:  # the next message may be valid
                reason = first_line(f"{type(error).__name__}: {error}")
                print(f"rank {self.rank}: dropped an invalid message ({reason})", file=sys.stderr, flush=True)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        """Dispatch one message.

        Raises:
            Exception: it does not have the format of `_post`.
        """
        header, body = frames
        kind, source, tag, dtype, shape = json.loads(header.bytes)
        if type(source) is not int or source not in self._peers or not isinstance(tag, str):
            raise ValueError(f"from {source!r}, tag {tag!r}")
        if kind == _ARRAY:
            self._queue(source, tag).put(_to_array(body, dtype, shape))
        elif kind == _VALUE:
            self._queue(source, tag).put(json.loads(body.bytes))
        elif kind == _STEP:
            self.last_steps[source] = int(tag)
        elif kind == _WHERE:
            print(json.loads(body.bytes), file=sys.stderr, flush=True)
            self._tell_where()
        elif kind == _BYE:
            self._left.add(source)
        elif kind == _LOST:
            if (peer := int(tag)) not in self._peers:
                raise ValueError(f"rank {peer} is not a peer")
            self._lose(peer)
        elif kind == _HELLO:
            self._absent.discard(source)
            if not self._absent:
                self._place.leave()  # all are connected: the names are no longer needed
        else:
            raise ValueError(f"kind {kind!r}")

    def _queue(self, source: int, tag: str) -> queue.Queue[Any]:
        """The queue of messages from a source with a tag. Sender and receiver may request it first at the same time:
        with two queues they would miss each other."""
        with self._inbox_lock:
            return self._inbox.setdefault((source, tag), queue.Queue())

    def _post(self, peer: int, kind: str, tag: str = "", body: Any = b"", array: Array | None = None) -> None:
        described = ("", ()) if array is None else (_named(array.dtype), array.shape)
        header = json.dumps((kind, self.rank, tag, *described)).encode()
        with self._lock:
            self._peers[peer].send_multipart([header, body], copy=False)

    def send(self, peer: int, tag: Hashable, array: Array) -> None:
        """Send a copy of `array` and return at once."""
        self._post(peer, _ARRAY, _text(tag), array.tobytes(), array)

    def send_value(self, peer: int, tag: Hashable, value: Any) -> None:
        """Send a number, a text, or lists and mappings of these, as `send` does."""
        self._post(peer, _VALUE, _text(tag), json.dumps(value).encode())

    def receive(self, peer: int, tag: Hashable, timeout_s: float = RECEIVE_TIMEOUT_S) -> Any:
        """Receive the next message of `peer` with `tag`; other threads run while it waits.

        Raises:
            TransportError: no message arrived within the time-out.
        """
        begin = now()
        message = self._receive(peer, tag, timeout_s)
        TRACE.add("wait", f"for rank {peer}", begin)
        return message

    def _receive(self, peer: int, tag: Hashable, timeout_s: float) -> Any:
        waiting, early = self._queue(peer, _text(tag)), min(self.watchdog_s, timeout_s)
        if self._doing.startswith(_IN):  # elsewhere a rank may wait long, for example for a request to serve
            try:
                return waiting.get(timeout=early)
            except queue.Empty:
                self._tell_where(f", for rank {peer}")
        else:
            early = 0.0
        try:
            return waiting.get(timeout=timeout_s - early)
        except queue.Empty:
            message = f"rank {self.rank} waited {timeout_s:.0f} s for rank {peer}, message {tag}"
            print(message, file=sys.stderr, flush=True)
            raise TransportError(message) from None

    def watched(self, what: str, run: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """Wrap `run`, a message of a graph, so that this rank's reports of its position name it."""

        def call(x: Array) -> Array:
            begin = now()
            self._doing, self._since = f"{_IN}{what}", begin
            result = run(x)
            self._doing, self._since = f"busy since {what}", now()
            self.communication_s += self._since - begin
            TRACE.add("communication", what, begin)
            return result

        return call

    def _tell_where(self, more: str = "") -> None:
        """Report this rank's position to all ranks, at most once in `watchdog_s` seconds."""
        now = time.monotonic()
        if now - self._told_at < self.watchdog_s:
            return
        self._told_at = now
        step = "no step done yet" if self._step is None else f"step {self._step} was its last"
        line = f"rank {self.rank}: {self._doing}{more}, for {now - self._since:.0f} s; {step}"
        print(line, file=sys.stderr, flush=True)
        for peer in self._peers:
            self._post(peer, _WHERE, body=json.dumps(line).encode())

    def announce_step(self, step: int) -> None:
        """Report to all ranks the step that this rank has finished, which they name if it is killed."""
        self._step = step
        for peer in self._peers:
            self._post(peer, _STEP, str(step))

    def gather_values(self, value: Any, tag: Hashable, ranks: Sequence[int] | None = None) -> list[Any]:
        """Values of all ranks, in rank order."""
        ranks = range(self.size) if ranks is None else ranks
        for peer in ranks:
            if peer != self.rank:
                self.send_value(peer, tag, value)
        return [value if peer == self.rank else self.receive(peer, tag) for peer in ranks]

    def share_value(self, value: Any, source: int, tag: Hashable) -> Any:
        """Broadcast the value of rank `source`."""
        if self.rank != source:
            return self.receive(source, tag)
        for peer in self._peers:
            self.send_value(peer, tag, value)
        return value

    def close(self) -> None:
        """Close the connections gracefully; sent messages still arrive. Threads end, and sockets close, once all peers have
        closed, too."""
        if self._closing:
            return
        for peer in self._peers:
            self._post(peer, _BYE)
        self._closing = True
        # The goodbye and the disconnection travel separately, and peers react to the latter at once: before msrun, which
        # polls every second, kills them as well.
        time.sleep(GOODBYE_S)
        for peer, socket in self._peers.items():
            socket.disable_monitor()
            socket.close(linger=0 if peer in self._left else LINGER_MS)
        self._place.leave()
        closer = threading.Thread(target=self._finish, daemon=True)
        with contextlib.suppress(RuntimeError):  # Python is ending, and starts no thread
            closer.start()
            self._closer = closer

    def close_at_exit(self) -> None:
        """Close the connections, and wait until what was sent has left this process."""
        self.close()
        self._exiting.set()
        if self._closer:
            self._closer.join(LINGER_MS / 1000 + 1)
        else:
            self._finish()

    def _finish(self) -> None:
        """Close what receives. A peer that has not read the goodbye yet would take it for the end of this process, so wait
        for that of each peer."""
        deadline = time.monotonic() + WATCHDOG_S
        while self._left < self._peers.keys() and time.monotonic() < deadline and not self._exiting.wait(0.05):
            pass
        self._context.term()  # it ends the thread that receives


@functools.lru_cache(maxsize=1 << 16)
def _text(tag: Hashable) -> str:
    """Serialize a tag."""
    return json.dumps(tag)


def _named(dtype: np.dtype[Any]) -> str:
    """The name of a type that a message may hold.

    Raises:
        TypeError: it may not; the receiver would drop the message, and wait for it.
    """
    if dtype.name == BFLOAT16.name:  # of ml_dtypes or MindSpore; its str is that of two untyped bytes
        return BFLOAT16.name
    if dtype.kind not in NUMBERS:
        raise TypeError(f"messages hold numbers, not {dtype}")
    return dtype.str


def _to_array(body: zmq.Frame, dtype: str, shape: Sequence[int]) -> Array:
    kind = BFLOAT16 if dtype == BFLOAT16.name else np.dtype(dtype)
    if (kind.kind not in NUMBERS and kind != BFLOAT16) or math.prod(shape) * kind.itemsize != len(body):
        raise ValueError(f"{len(body)} bytes for {shape} of {dtype}")
    return np.frombuffer(body.buffer, kind).reshape(shape)


class Collectives:
    """Collectives over the ranks `group` under one tag. Sums run in rank order, so every rank gets bitwise equal
    results."""

    def __init__(self, transport: Transport, group: Sequence[int], tag: Hashable):
        self.transport, self.group, self.tag = transport, list(group), tag
        self.place = self.group.index(transport.rank)

    def exchange(self, parts: Sequence[Array], phase: str = "") -> list[Array]:
        """Send part i to the i-th rank (all-to-all); return what each rank sent to this one."""
        tag = (self.tag, phase)
        for i, peer in enumerate(self.group):
            if i != self.place:
                self.transport.send(peer, tag, np.ascontiguousarray(parts[i]))
        return [parts[i] if i == self.place else self.transport.receive(peer, tag) for i, peer in enumerate(self.group)]

    def all_gather(self, array: Array) -> Array:
        return np.concatenate(self.exchange([array] * len(self.group)))

    def reduce_scatter(self, array: Array, reduce: Callable[..., Any] = np.add) -> Array:
        return _fold(self.exchange(np.split(array, len(self.group))), reduce)

    def all_reduce(self, array: Array, reduce: Callable[..., Any] = np.add) -> Array:
        if array.nbytes <= SMALL_BYTES or len(self.group) == 2:
            return _fold(self.exchange([array] * len(self.group)), reduce)
        parts = np.array_split(array.reshape(-1), len(self.group))
        mine = _fold(self.exchange(parts, "reduce"), reduce)
        return np.concatenate(self.exchange([mine] * len(self.group), "gather")).reshape(array.shape)

    def all_to_all(self, array: Array, split_dim: int, concat_dim: int) -> Array:
        return np.concatenate(self.exchange(np.split(array, len(self.group), split_dim)), concat_dim)

    def broadcast(self, array: Array, root: int) -> Array:
        """Broadcast an array from the rank at position `root` in the group."""
        if self.place != root:
            return self.transport.receive(self.group[root], self.tag)
        for i, peer in enumerate(self.group):
            if i != root:
                self.transport.send(peer, self.tag, array)
        return array


def _fold(arrays: Sequence[Array], reduce: Callable[..., Any]) -> Array:
    result = reduce(arrays[0], arrays[1]) if len(arrays) > 1 else arrays[0].copy()
    for array in arrays[2:]:
        reduce(result, array, out=result)
    return result
