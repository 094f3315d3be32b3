# SPDX-License-Identifier: Apache-2.0
"""Delays in the ranks of benchmarks/simulate_real.py, whose processes have this folder in PYTHONPATH.

INJECTED names a JSON file, which is read again before each step: `base_s`, seconds that each rank sleeps in a step, as a
device would compute; and `faults`, each with `from` and `until` (seconds since 1970), `delay_s`, and the `rank` whose steps
or the `link` (two ranks) whose messages are slow. The number of messages of a step to each rank goes to INJECTED.RANK.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections import Counter

PLAN = os.environ.get("INJECTED", "")
PROCESSES, TRANSPORT = "sporeloom.runtime.cpu.processes", "sporeloom.runtime.cpu.transport"
links = {}
sent = Counter()


def plan():
    try:
        with open(PLAN, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def slow_steps(module):
    """Sleep before each step, and note which links are slow in it."""
    begin = module.CpuProcesses.begin_step

    def begin_step(self, step):
        found, now = plan(), time.time()
        active = [fault for fault in found.get("faults", ()) if fault["from"] <= now < fault["until"]]
        seconds = [fault["delay_s"] for fault in active if fault.get("rank") == self.rank]
        links.clear()
        links.update(
            {fault["link"][1]: fault["delay_s"] for fault in active if fault.get("link", [None])[0] == self.rank}
        )
        if sent and step > 1:
            with open(f"{PLAN}.{self.rank}", "w", encoding="utf-8") as file:
                json.dump({"size": self.strategy.mesh.size, "sent": sent}, file)
        sent.clear()
        time.sleep(found.get("base_s", 0.0) + sum(seconds))
        begin(self, step)

    module.CpuProcesses.begin_step = begin_step


def slow_messages(module):
    """Sleep before each array that goes over a slow link, and count them."""
    send = module.Transport.send

    def slow_send(self, peer, tag, array):
        sent[peer] += 1
        if delay := links.get(peer):
            time.sleep(delay)
        send(self, peer, tag, array)

    module.Transport.send = slow_send


class Patch(importlib.abc.MetaPathFinder):
    """Change two modules when they are imported."""

    changes = {PROCESSES: slow_steps, TRANSPORT: slow_messages}

    def find_spec(self, name, path, target=None):
        if name not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.changes[name](module)

        spec.loader.exec_module = exec_module
        return spec


if PLAN:
    sys.meta_path.insert(0, Patch())
