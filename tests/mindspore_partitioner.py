# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own partitioner as a reference, for any rank of any cluster on a machine without accelerator: a virtual
Ascend target. It uses private symbols of MindSpore."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore._c_expression import MSContext
from mindspore.communication import _comm_helper as comm_helper
from mindspore.communication import management as comm_management
from mindspore.context import _context as global_context

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.device import pin_cpu
from sporeloom.mindspore_compat.names import (
    SUPPORTED_VERSIONS,
    cell_graph_executor,
    mind_ir,
)
from sporeloom.mindspore_compat.symbols import MissingSymbolError, lacks, library
from sporeloom.runtime.by_mindspore.context import auto_parallel_context
from sporeloom.runtime.by_mindspore.graph_checks import check_graph, groups_in
from sporeloom.runtime.by_mindspore.layouts import read_layouts
from sporeloom.runtime.compiler import faster_compilation
from sporeloom.runtime.spmd.rank_graph import RankGraph, refusal, remove_dump
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape

WORLD = "hccl_world_group"
CHIP = "ascend910b"
"""MindSpore's name of the chip. On the first 910, a group within a server has 1, 2, 4 or 8 devices."""

REGISTER_INIT = "_ZN9mindspore9MsContext16RegisterInitFuncERKSsPFvPS0_E"  # MsContext::RegisterInitFunc
HARMLESS = "_ZNK9mindspore9MsContext14enable_dump_irEv"  # takes a context, does nothing to it
CURRENT_CONTEXT = "_ZN9mindspore9MsContext11GetInstanceEv"  # MsContext::GetInstance: a new one for each device
SET_CHIP = "_ZN9mindspore9MsContext22set_ascend_soc_versionERKSs"  # MsContext::set_ascend_soc_version
LOG_LEVELS = "_ZN9mindspore25g_ms_submodule_log_levelsE"  # int[], by SubModuleId of log_adapter.h
REGISTER_COMMUNICATOR = "_ZN9mindspore11CommManager8RegisterERKSsRKSt10shared_ptrIS0_E"  # CommManager::Register

_PARALLEL_SUBMODULE, _CRITICAL = 14, 4


class _Communicator:
    """Replaces MindSpore's CommManager by records of ranks and groups. C++ calls it through a vtable created here."""

    def __init__(self) -> None:
        self.rank = 0
        self.groups: dict[str, list[int]] = {WORLD: [0]}
        self._keep: list[Any] = []  # everything C++ points at must outlive the process's last compile

    def enter(self, rank: int, size: int) -> None:
        self.rank = rank
        self.groups[WORLD] = list(range(size))  # other groups keep their ranks: MindSpore creates each once

    def register(self) -> None:
        try:
            core, common = library("core"), library("common")
            register_init, harmless = getattr(core, REGISTER_INIT), getattr(core, HARMLESS)
            register_comm = getattr(common, REGISTER_COMMUNICATOR)
            current_context, set_chip = getattr(core, CURRENT_CONTEXT), getattr(core, SET_CHIP)
            self._log_levels = (ctypes.c_int * (_PARALLEL_SUBMODULE + 1)).in_dll(core, LOG_LEVELS)
        except (OSError, AttributeError, ValueError) as error:
            raise lacks(error) from None
        # The Ascend environment checks print alarming lines about missing packages; nothing here needs those packages.
        MSContext.get_instance().register_check_env_callback(lambda *_: None)
        MSContext.get_instance().register_set_env_callback(lambda *_: None)
        register_init.restype = current_context.restype = set_chip.restype = None
        self._current_context, self._set_chip = current_context, set_chip
        register_init(self._string("Ascend"), harmless)
        register_comm(self._string("Ascend"), self._instance())

    def name_chip(self) -> None:
        """Set the chip of the device, as its plugin does once it is chosen."""
        MSContext.get_instance().get_ascend_soc_version()  # the first access clears it
        context = (ctypes.c_void_p * 2)()  # the object and its reference count
        self._current_context(context)
        self._set_chip(ctypes.c_void_p(context[0]), self._string(CHIP))

    @contextlib.contextmanager
    def quiet_search(self) -> Iterator[None]:
        """Silence sharding propagation, which logs every layout that it tries and drops as an error. Failures are
        raised as well."""
        before = self._log_levels[_PARALLEL_SUBMODULE]
        self._log_levels[_PARALLEL_SUBMODULE] = _CRITICAL
        try:
            yield
        finally:
            self._log_levels[_PARALLEL_SUBMODULE] = before

    def _string(self, text: str) -> Any:
        """A `const std::string&` in libstdc++'s copy-on-write ABI: length, capacity, refcount, then the characters."""
        data = text.encode()
        buffer = ctypes.create_string_buffer(24 + len(data) + 1)
        struct.pack_into("qqi", buffer, 0, len(data), len(data), -1)
        ctypes.memmove(ctypes.addressof(buffer) + 24, data, len(data))
        pointer = ctypes.c_void_p(ctypes.addressof(buffer) + 24)
        self._keep += [buffer, pointer]
        return ctypes.byref(pointer)

    def _instance(self) -> Any:
        """A `shared_ptr<CommManager>` whose methods are Python functions."""
        void, flag, uint, uint_p = ctypes.c_void_p, ctypes.c_bool, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint)

        def create_group(_: Any, name: Any, ranks: Any) -> bool:
            begin, end = ctypes.cast(ranks, ctypes.POINTER(void))[0:2]
            self.groups[_read_string(name)] = list(ctypes.cast(begin, uint_p)[0 : ((end or 0) - (begin or 0)) // 4])
            return True

        def rank_in_group(_: Any, name: Any, out: Any) -> bool:
            out[0] = self.groups[_read_string(name)].index(self.rank)
            return True

        def group_size(_: Any, name: Any, out: Any) -> bool:
            out[0] = len(self.groups[_read_string(name)])
            return True

        function = ctypes.CFUNCTYPE
        methods = [
            function(None, void)(lambda _: None),  # the two destructors
            function(None, void)(lambda _: None),
            function(flag, void, void, void)(create_group),
            function(flag, void, void)(lambda *_: True),  # destroy a group
            function(flag, void, void, uint_p)(rank_in_group),
            function(flag, void, void, uint_p)(group_size),
            function(uint, void)(lambda _: self.rank),
        ]
        vtable = (void * len(methods))(*[ctypes.cast(method, void) for method in methods])
        instance = (void * 4)(ctypes.addressof(vtable))
        shared_pointer = (void * 2)(ctypes.addressof(instance))
        self._keep += [methods, vtable, instance, shared_pointer]
        return shared_pointer


def _read_string(reference: Any) -> str:
    characters = ctypes.cast(reference, ctypes.POINTER(ctypes.c_void_p))[0]
    length = ctypes.cast(characters - 24, ctypes.POINTER(ctypes.c_size_t))[0]
    return ctypes.string_at(characters, length).decode()


_communicator: _Communicator | None = None
_phases = itertools.count()


def _install() -> _Communicator:
    global _communicator
    if _communicator is None:
        if not ms.__version__.startswith(tuple(f"{version}." for version in SUPPORTED_VERSIONS)):
            raise MissingSymbolError(
                f"the virtual Ascend target knows MindSpore {' and '.join(SUPPORTED_VERSIONS)}, not {ms.__version__}"
            )
        communicator = _Communicator()
        communicator.register()
        _communicator = communicator
    return _communicator


@contextlib.contextmanager
def virtual_ascend(rank: int, size: int) -> Iterator[dict[str, list[int]]]:
    """Make MindSpore act as `rank` of `size` Ascend devices in the block. Yields {group name: ranks}, filled by
    compilation.

    Tensors created inside belong to the virtual target: do not pass them to a CPU graph.

    Raises:
        MissingSymbolError: this MindSpore has an unsupported version, or lacks the required symbols.
    """
    pin_cpu()
    communicator = _install()
    communicator.enter(rank, size)
    comm = comm_helper.GlobalComm
    saved = (comm.INITED, comm.BACKEND, comm.WORLD_COMM_GROUP)
    helpers = [(module, name, getattr(module, name)) for module in (comm_helper, comm_management) for name in _HELPERS]
    for module, name, _ in helpers:
        setattr(module, name, _HELPERS[name](communicator))
    comm.INITED, comm.BACKEND, comm.WORLD_COMM_GROUP = True, comm_helper.Backend("hccl"), WORLD
    try:
        global_context().set_device_target("Ascend")  # set_context would warn, and set_device works only once
        communicator.name_chip()
        with communicator.quiet_search():
            yield communicator.groups
    finally:
        global_context().set_device_target("CPU")
        comm.INITED, comm.BACKEND, comm.WORLD_COMM_GROUP = saved
        for module, name, original in helpers:
            setattr(module, name, original)


_HELPERS = {
    "_get_rank_helper": lambda communicator: lambda group: communicator.groups[group].index(communicator.rank),
    "_get_size_helper": lambda communicator: lambda group: len(communicator.groups[group]),
}


def partition(
    cell: nn.Cell,
    strategy: Strategy,
    rank: int,
    inputs: Sequence[tuple[Shape, Any]],
) -> RankGraph:
    """Partition `cell` for `rank` with MindSpore.

    Args:
        inputs: global shape and NumPy dtype of each input.

    Raises:
        ConfigError: MindSpore cannot partition it, or the graph would not be equivalent to one device.
    """
    executor = cell_graph_executor._graph_executor
    with (
        faster_compilation(),
        virtual_ascend(rank, strategy.mesh.size) as groups,
        auto_parallel_context(strategy, rank),
    ):
        tensors = [Tensor(np.zeros(shape, dtype)) for shape, dtype in inputs]
        name = f"export.mindir.{rank}.{next(_phases)}"
        try:
            phase, _ = cell_graph_executor.compile(cell, *tensors, phase=name, do_convert=False)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            remove_dump(rank)
            raise ConfigError(refusal(error, f"{strategy.source}: MindSpore cannot partition the network")) from None
        model = mind_ir.ModelProto.FromString(executor.get_func_graph_proto(phase, "mind_ir", False))
        layouts = read_layouts(executor.get_parameter_layout(phase))
        used = groups_in(model) | {layout.optimizer_group for layout in layouts.values()}
        held = {name: ranks for name, ranks in groups.items() if name in used}
        check_graph(model, executor.get_strategy(phase), held, cell, strategy.source)
    return RankGraph(model, layouts, held, rank)
