# SPDX-License-Identifier: Apache-2.0
"""Distributed preprocessing: Ray runs one task for each shard of the input, and only file names are sent to it.

A task writes what it made of its shard to a folder that every node sees, under a name that appears when it is complete. So a
task of a lost worker or node is done again alone, and a run that was killed continues with the shards that are missing. This
process reads the files in the order of the shards: what comes out is byte for byte what one process makes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_atomically
from sporeloom.core.lines import first_line
from sporeloom.core.log import counted, milestone
from sporeloom.data.frames import read_frames, write_frames
from sporeloom.data.sources import Batch, DocumentSource, FilePart
from sporeloom.data.stores import stamp
from sporeloom.data.workers import WorkersLostError, ordered_map

Item = TypeVar("Item")
Result = TypeVar("Result")
CONNECT_S = 10.0
END_S = 30.0
"""Seconds that cancelled tasks may take to end."""
TRIES = 4
"""Number of attempts at a shard whose worker is lost each time."""


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster."""

    address: str | None
    """Address of a running cluster, `auto` or HOST:PORT; None: one is started on this machine."""
    cpus: int
    """Number of workers of the cluster that is started."""
    scratch: Path
    """Folder for the output of tasks; every node sees it under this name."""


Workers = int | RayCluster
"""Number of processes of this machine, 0: this one alone; or a cluster."""


def over_batches(
    workers: Workers,
    kind: type[Result],
    make_work: Callable[[], Callable[[Batch], Result]],
    source: DocumentSource,
    all_fields: bool = False,
    skip: int = 0,
) -> Iterator[Result]:
    """Run `make_work()(batch)` on every batch of a source but the first `skip`, and yield the results in order.

    Args:
        kind: what the work returns, a dataclass (see `sporeloom.data.frames`).
        make_work: on a cluster a `functools.partial`, whose arguments distinguish its results from those of other work.

    Raises:
        WorkersLostError: a process ended from outside, and on a cluster its shard could not be done elsewhere.
    """
    if isinstance(workers, RayCluster):
        results = _over_shards(workers, kind, make_work, source, all_fields)
        yield from (result for number, result in enumerate(results) if number >= skip)
        return
    batches = (batch for number, batch in enumerate(source.batches(all_fields)) if number >= skip)
    in_order = ordered_map(make_work, batches, workers)
    try:
        yield from in_order
    finally:
        in_order.close()  # type: ignore[attr-defined]


def over(
    workers: Workers, make_work: Callable[[], Callable[[Item], Result]], items: Iterable[Item]
) -> Iterator[Result]:
    """Run `make_work()(item)` on small items with small results, and yield these in order. `make_work`: as for
    `over_batches`.

    Raises:
        WorkersLostError: as `over_batches`.
    """
    if isinstance(workers, RayCluster):
        key = _identity(make_work)
        yield from _ordered(workers, _one_item, ((key, make_work, item) for item in items))
    else:
        yield from ordered_map(make_work, items, workers)


def _over_shards(
    cluster: RayCluster,
    kind: type[Result],
    make_work: Callable[[], Callable[[Batch], Result]],
    source: DocumentSource,
    all_fields: bool,
) -> Iterator[Result]:
    shards = source.shards()
    stamps = [(stamp(piece.path), piece.start, piece.end) for files in shards for piece in files]
    key = _identity(make_work)
    folder = cluster.scratch / hashlib.sha256(repr((key, source, stamps, all_fields)).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    if finished := sum(1 for _ in folder.glob("*.results")):
        milestone(f"{folder}: {finished} of {len(shards)} shards are done already")
    begun = time.monotonic()
    tasks = (
        (key, make_work, source, number, files, all_fields, folder / f"{number:08}.results")
        for number, files in enumerate(shards)
    )
    try:
        for path in _ordered(cluster, _one_shard, tasks):
            yield from read_frames(path, kind)
        seconds, before = time.monotonic() - begun, f", {finished} of them before" if finished else ""
        milestone(f"processed {counted(len(shards), 'shard', 'shards')}{before}, in {seconds:.0f} s")
    except WorkersLostError:
        raise  # what was done is kept
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # results of other work are there
            cluster.scratch.rmdir()
        raise


def _identity(make_work: Callable[[], Any]) -> str:
    """Identity of the results of work: its function, its arguments, and the files that these name."""
    assert isinstance(make_work, partial), make_work
    function, given = make_work.func, (make_work.args, make_work.keywords)
    named = f"{function.__module__}.{function.__qualname__}{given!r}{list(_stamps(given))}"
    return hashlib.sha256(named.encode()).hexdigest()


def _stamps(value: Any) -> Iterator[tuple[str, int, str | int]]:
    """Name, size and time of every file that is named in a value."""
    if isinstance(value, Path) and value.is_file():
        yield stamp(value)
    elif isinstance(value, Path) and value.is_dir():
        yield from (stamp(path) for path in sorted(value.iterdir()) if path.is_file())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _stamps([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, (list, tuple, dict)):
        yield from (found for part in (value.values() if isinstance(value, dict) else value) for found in _stamps(part))


_works: dict[str, Callable[[Any], Any]] = {}


def _work(key: str, make_work: Callable[[], Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Create the work once in each process, as in a pool; a process has one kind of work at a time."""
    if key not in _works:
        _works.clear()
        _works[key] = make_work()
    return _works[key]


def _one_item(key: str, make_work: Callable[[], Callable[[Any], Any]], item: Any) -> Any:
    return _work(key, make_work)(item)


def _one_shard(
    key: str,
    make_work: Callable[[], Callable[[Any], Any]],
    source: DocumentSource,
    number: int,
    files: list[FilePart],
    all_fields: bool,
    path: Path,
) -> Path:
    """Run a task: write the results of all batches of a shard, one after the other, to a file."""
    if path.exists():
        return path

    def write(partial: Path) -> None:
        work = _work(key, make_work)
        with partial.open("wb") as file:
            write_frames(file, map(work, source.batches_of(number, files, all_fields)))

    write_atomically(path, write)
    return path


def _ordered(cluster: RayCluster, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Results of Ray tasks in their order, a bounded number under way."""
    ray = _connected(cluster)
    # Errors in the user's data are reported at once; the task of a lost worker is tried again.
    remote = ray.remote(max_retries=TRIES - 1, retry_exceptions=False, num_cpus=1)(function)
    most, pending = 2 * int(ray.cluster_resources().get("CPU", 1)) + 2, deque[Any]()
    try:
        for task in tasks:
            pending.append(remote.remote(*task))
            if len(pending) > most:
                yield ray.get(pending.popleft())
        while pending:
            yield ray.get(pending.popleft())
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ConfigError) else error) from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.RayError) as error:
        raise WorkersLostError(
            f"a shard was lost {TRIES} times ({type(error).__name__}); the same command continues with the missing ones"
        ) from None
    finally:
        for reference in pending:
            ray.cancel(reference)
        if pending:  # tasks that still run write files, which the caller may remove
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait([*pending], num_returns=len(pending), timeout=END_S)


def _connected(cluster: RayCluster) -> Any:
    """Ray, connected to a cluster.

    Raises:
        ConfigError: it is not installed, or nobody answers at the address.
    """
    try:
        ray, _ = import_module("ray"), import_module("msgpack")
    except ModuleNotFoundError:
        raise ConfigError("--engine ray needs Ray: pip install -e '.[ray]'") from None
    if not ray.is_initialized():
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if cluster.address:
                _check_address(cluster.address)
                ray.init(address=cluster.address, **quiet)
            else:
                ray.init(num_cpus=cluster.cpus, include_dashboard=False, **quiet)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            what = (
                f"--address {cluster.address}: no Ray cluster there"
                if cluster.address
                else "Ray cannot be started here"
            )
            raise ConfigError(f"{what}: {first_line(error)}") from None
    return ray


def _check_address(address: str) -> None:
    """Check the address quickly: Ray itself would wait for minutes.

    Raises:
        OSError: nobody answers there.
        ValueError: it is not an address.
    """
    if address != "auto" and "://" not in address:
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError("give HOST:PORT, or auto")
        socket.create_connection((host, int(port)), CONNECT_S).close()


def leave(workers: Workers) -> None:
    """After success: remove what tasks wrote, and end the cluster that was started."""
    if isinstance(workers, RayCluster):
        shutil.rmtree(workers.scratch, ignore_errors=True)
        import_module("ray").shutdown()  # does nothing where none was started
