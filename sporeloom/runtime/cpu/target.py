# SPDX-License-Identifier: Apache-2.0
"""A virtual Ascend target: MindSpore's partitioner for any rank of any cluster, on a machine without accelerator.

It uses private symbols of MindSpore, and therefore checks MindSpore's version and the symbols first.
How it works: docs/explanation/partitioning.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import mindspore as ms

from sporeloom.mindspore_compat.names import (
    CURRENT_CONTEXT,
    HARMLESS,
    LOG_LEVELS,
    REGISTER_COMMUNICATOR,
    REGISTER_INIT,
    SET_CHIP,
    SUPPORTED_VERSIONS,
    MSContext,
    comm_helper,
    comm_management,
    global_context,
    is_supported_version,
)
from sporeloom.mindspore_compat.symbols import TargetError, lacks, library

WORLD = "hccl_world_group"
CHIP = "ascend910b"
"""MindSpore's name of the chip. On the first 910, a group within a server has 1, 2, 4 or 8 devices."""

_PARALLEL_SUBMODULE, _CRITICAL = 14, 4


class _Communicator:
    """Replaces MindSpore's CommManager by records of ranks and groups. C++ calls it through a vtable created here."""

    def __init__(self) -> None:
        self.rank = 0
        self.first_size: int | None = None
        self.groups: dict[str, list[int]] = {WORLD: [0]}
        self._keep: list[Any] = []  # everything C++ points at must outlive the process's last compile

    def enter(self, rank: int, size: int) -> None:
        self.first_size = self.first_size or size
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


def _install() -> _Communicator:
    global _communicator
    if _communicator is None:
        if not is_supported_version():
            raise TargetError(
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
        TargetError: this MindSpore has an unsupported version, or lacks the required symbols.
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


def compiled_size() -> int | None:
    """Number of devices that this process first compiled for; None before. MindSpore keeps its world group from then
    on: graphs for another number of devices get their own collectives, but means and gradients for the first number."""
    return _communicator.first_size if _communicator else None


def pin_cpu() -> None:
    """Fix the real device of this process, to which `virtual_ascend` returns. Call it before any kernel runs.

    Raises:
        TargetError: kernels have run already without a device set.
    """
    try:
        ms.set_device("CPU")
    except RuntimeError:
        raise TargetError(
            'MindSpore has run in this process before its device was set: call mindspore.set_device("CPU") first'
        ) from None


_HELPERS = {
    "_get_rank_helper": lambda communicator: lambda group: communicator.groups[group].index(communicator.rank),
    "_get_size_helper": lambda communicator: lambda group: len(communicator.groups[group]),
}
