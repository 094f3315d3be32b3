# SPDX-License-Identifier: Apache-2.0
"""Trains networks as users write them, on one device and under meshes with `engine="spmd"`, many in one job.

The networks are in `user_losses.py`, `user_models.py` and `user_scripts.py`: each is a function of `parallel`, which makes a
network parallel, or leaves it as it is. It returns what it found out, losses first, and the Cells that it trained.
"""

import gc
import pickle
import time
import traceback
import unittest.mock
from collections import Counter
from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Tensor
from user_losses import CASES as LOSSES
from user_models import CASES as MODELS
from user_scripts import CASES as SCRIPTS

from sporeloom import auto_parallel
from sporeloom.core.errors import ConfigError
from sporeloom.partition import operators
from sporeloom.runtime import auto_parallel as module
from sporeloom.runtime import inputs as agreements
from sporeloom.runtime.cpu.processes import CpuProcesses
from sporeloom.runtime.cpu.transport import Collectives
from sporeloom.strategy.loader import strategy_of

CASES = {**LOSSES, **MODELS, **SCRIPTS}
MESHES = {"dp4": {"dp": 4}, "dp2 tp2": {"dp": 2, "tp": 2}, "pp2 dp2": {"pp": 2, "dp": 2}}
ONE_LAYER = ("barlow twins", "simclr", "tied autoencoder")
"""Of which a pipeline cannot make two stages."""
CLOSE, CLOSE_WEIGHTS = 1e-5, 3e-5


def flat(found):
    """Numbers of all losses and other outputs, in order."""
    if isinstance(found, Tensor):
        return flat(found.asnumpy())
    if isinstance(found, dict):
        return flat(list(found.values()))
    if isinstance(found, (list, tuple)):
        return [number for each in found for number in flat(each)]
    return np.asarray(found, np.float64).ravel().tolist()


def run(case, parallel):
    """Outputs, and the parameters of each trained Cell."""
    ms.set_seed(3)
    np.random.seed(3)
    found, cells = case.script(parallel)
    return flat(found), [p for cell in cells for p in cell.get_parameters()]


def on_one_device(case):
    found, parameters = run(case, lambda net: net)
    return found, [p.asnumpy() for p in parameters]


def close_engines():
    for engine in module._engines.values():
        engine.close()
    kept = (module._engines, module._networks, module._contents, module._steps, module._calls, module._compared)
    for known in (*kept, agreements._agreed):
        known.clear()
    gc.collect()


def names():
    return list(CASES)


def compare(names, meshes):
    """Of this rank, by name and mesh: whether it is as it should be; how far it is off, and in what, or why it is refused;
    what was computed unsharded; seconds."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    backend = CpuProcesses.join(strategy_of({"mesh": {"dp": 4}}))
    own, told, expected = {}, {}, {}
    for name in names[backend.rank :: 4]:
        own[name] = None if CASES[name].refused else references(name)
    group = Collectives(backend.transport, range(4), "of one device")
    for rank in range(4):
        given = np.frombuffer(pickle.dumps(own) if rank == backend.rank else b"", np.uint8)
        expected |= pickle.loads(group.broadcast(given, rank).tobytes())
    for name in names:
        for mesh in meshes:
            start = time.perf_counter()
            worst, what, unsharded = compared(name, mesh, expected[name])
            refused = "more than the 1 layers" if "pp" in MESHES[mesh] and name in ONE_LAYER else CASES[name].refused
            good = refused in what if refused else worst is not None and worst <= 1
            told[f"{name}, {mesh}"] = good, worst, what, unsharded, time.perf_counter() - start
    backend.close()
    return told


def planted():
    """What `check=True` says of a partitioner that forgets that the gradient of a bias is a sum over the batch."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    case, whole = CASES["checked step"], operators.HANDLERS["BiasAddGrad"]

    def forgetful(op):
        plan = whole(op)
        return replace(plan, outputs=tuple(layout.reduced() for layout in plan.outputs))

    with unittest.mock.patch.dict(operators.HANDLERS, {"BiasAddGrad": forgetful}):
        _, said, _ = compared("checked step", "dp2 tp2", on_one_device(case))
    return said


def references(name):
    try:
        return on_one_device(CASES[name])
    except Exception:
        return traceback.format_exc()


def compared(name, mesh, expected):
    """As `compare` gives it."""
    if isinstance(expected, str):
        return None, f"on one device: {expected}", {}
    case = CASES[name]
    settings = {**case.settings, **({"rules": case.rules} if "tp" in MESHES[mesh] else {})}
    settings |= {"pipeline": {"num_microbatches": 2}} if "pp" in MESHES[mesh] else {}
    used = []

    def parallel(net):
        given = auto_parallel(net, mesh=MESHES[mesh], engine="spmd", **settings)
        used[:] = [module.parallel_of(given, "the test").engine]
        return given

    try:
        found, parameters = run(case, parallel)
    except ConfigError as error:
        close_engines()
        return None, str(error), {}
    except Exception:  # on all ranks alike, or else the next case ends by its time
        close_engines()
        return None, traceback.format_exc(), {}
    if expected is None:
        close_engines()
        return None, "it is not refused", {}
    worst, unsharded = (off(found, expected[0], CLOSE), "losses"), Counter()
    for program in used[0].backend.programs.values():
        unsharded.update(
            [f"whole batch: {program.cut.why_whole}"] if hasattr(program, "cut") and program.cut.why_whole else []
        )
    for sharded in used[0].backend.sharded:
        unsharded += sharded.unsharded
    for parameter, whole in zip(parameters, expected[1], strict=True):
        if not used[0].holds_now(parameter, whole.shape):
            continue  # another stage does
        part = used[0].held_slice(parameter.name, whole.shape)
        worst = max(
            worst, (off(parameter.asnumpy(), whole[part.slices if part else ...], CLOSE_WEIGHTS), parameter.name)
        )
    close_engines()
    return *worst, dict(unsharded)


def off(found, expected, close):
    """Largest difference, in tolerances: 1 is as much as may be."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        return float("inf")
    away = np.abs(found - expected) / (close * (1 + np.abs(expected)))
    return float(np.nan_to_num(away, nan=np.inf).max(initial=0.0))
