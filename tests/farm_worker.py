# SPDX-License-Identifier: Apache-2.0
"""The warm processes of a farm: each does what it is told, one task after the other. farm_worker.py FILE-DESCRIPTOR ...

One of them loads MindSpore and forks the others. A task is a line of JSON, and so is its answer. What a task changes in a
process is put back after it.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from sporeloom.core.errors import run_tool
from sporeloom.core.processes import end_with_parent
from sporeloom.runtime.cpu.transport import Transport
from sporeloom.runtime.environment import prepare_environment
from sporeloom.runtime.quiet import quiet_threads

ROOT = Path(__file__).resolve().parent.parent
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RecordedTransport:
    """Remembers the connections of a task: a process closes them when it ends, which this one does not."""

    def __init__(self):
        self.opened, start = [], Transport.__init__

        def recording(transport, *arguments):
            start(transport, *arguments)
            self.opened.append(transport)

        Transport.__init__ = recording

    def close(self):
        while self.opened:
            self.opened.pop().close()


@contextlib.contextmanager
def as_a_process_of_its_own(task):
    """Streams, environment, folder and signal handlers as the task asks for, and as before afterwards."""
    environment, handlers = dict(os.environ), [signal.getsignal(number) for number in SIGNALS]
    saved, stdin = [os.dup(1), os.dup(2)], sys.stdin
    # The ranks of a job name their connections by the engines they made before; some sat out earlier tasks.
    sys.modules["sporeloom.runtime.cpu.processes"]._joined.clear()
    if scripts := sys.modules.get("sporeloom.runtime.auto_parallel"):
        for known in (scripts._engines, scripts._networks, scripts._contents, scripts._steps, scripts._calls):
            known.clear()
    for number, name in ((1, task["stdout"]), (2, task["stderr"])):
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.environ.update(task["environment"])
    os.chdir(task["folder"])
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, handle in zip((1, 2), saved, strict=True):
            os.dup2(handle, number)
            os.close(handle)
        sys.stdin = stdin
        os.chdir(ROOT)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
        gc.enable()
        gc.collect()  # networks lie in cycles; with them go their compiled graphs


@functools.cache
def loaded(path):
    """The module of a file. Its own processes find it by name, as its folder is where Python looks."""
    folder, name = str(Path(path).parent), Path(path).stem
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def perform(task, transports):
    """The answer to a task: `value` of a function, or `code` of a tool; `code` 1 and a traceback on stderr for an error."""
    with as_a_process_of_its_own(task):
        try:
            work = getattr(loaded(task["file"]), task["function"])
            if task["is_tool"]:
                run_tool(work, task["arguments"])
            answer = {"code": 0, "value": work(*task["arguments"])}
        except SystemExit as ended:
            answer = {"code": ended.code or 0, "value": None}
        except BaseException:
            traceback.print_exc()
            answer = {"code": 1, "value": None}
        transports.close()
        return answer


def forked(descriptors):
    """The descriptor of this process: there is one for each from now on. They end with the first, and that with the tests."""
    first, mine = os.getpid(), descriptors[0]
    for descriptor in descriptors[1:]:
        if os.fork() == 0:
            end_with_parent(first)
            mine = descriptor
            break
    for other in descriptors:
        if other != mine:
            os.close(other)  # or nobody would notice that its process has ended
    return mine


def main(descriptors):
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the tests, who end this process
    prepare_environment()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        quiet_threads(1)  # two test processes share the cores, too
    importlib.import_module("sporeloom.train.trainer")  # MindSpore, and most of ours
    importlib.import_module("sporeloom.mindspore_compat.device").pin_cpu()  # whatever the first task is
    importlib.import_module(
        "sporeloom.runtime.compiler"
    ).set_faster_switches()  # for tasks that call networks themselves
    gc.freeze()  # none of it is garbage
    transports = RecordedTransport()
    with socket.socket(fileno=forked(descriptors)) as connection, connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            task = json.loads(line)
            with open(task["stderr"], "a", encoding="utf-8") as errors:
                faulthandler.dump_traceback_later(task["timeout_s"] * 0.95, file=errors)
                answer = perform(task, transports)
                faulthandler.cancel_dump_traceback_later()
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
