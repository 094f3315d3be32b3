# SPDX-License-Identifier: Apache-2.0
"""The control group that bounds the memory of what `jail` runs; the standard library alone."""

import contextlib
import itertools
import os
import time

LOOK_EVERY_S = 0.02


class MemoryGroup:
    """A control group that counts all memory of these processes, with shared memory and the kernel's own, where
    there is one.

    Where nobody may make one, pages, page tables and sockets are counted; the filter of system calls, the absence of
    /dev/shm and the size of the folder leave nothing else to hoard in.
    """

    def __init__(self, limit: int):
        self.events: int | None = None
        self.name = f"sporeloom-{os.getpid()}"
        for path, maximum, events in memory_groups():
            self.base = os.open(path, os.O_RDONLY)  # by its handle: the path leads nowhere once the root is another
            try:
                self._remove_left()
                os.mkdir(self.name, dir_fd=self.base)
                self._write(f"{self.name}/{maximum}", str(limit))
                with contextlib.suppress(OSError):
                    self._write(f"{self.name}/memory.swap.max", "0")
                self.events = os.open(f"{self.name}/{events}", os.O_RDONLY, dir_fd=self.base)
                return
            except OSError:
                self._remove(self.name)
                os.close(self.base)

    def _write(self, path: str, text: str) -> None:
        handle = os.open(path, os.O_WRONLY, dir_fd=self.base)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.base)

    def _remove_left(self) -> None:
        """Remove the groups of jails that were killed."""
        for name in os.listdir(self.base):
            if name.startswith("sporeloom-") and not os.path.exists(f"/proc/{name.partition('-')[2]}"):
                self._remove(name)

    def join(self) -> None:
        """Count this process and its children. Not the one that watches, which the kernel might end in their place."""
        if self.events is not None:
            self._write(f"{self.name}/cgroup.procs", "0")

    def is_exceeded(self) -> bool:
        """Whether the kernel had to end a process because memory ran out."""
        if self.events is None:
            return False
        words = os.pread(self.events, 4096, 0).decode().split()
        return any(key == "oom_kill" and int(count) > 0 for key, count in itertools.pairwise(words))

    def remove(self) -> None:
        """Remove the group, once its processes have ended."""
        if self.events is not None:
            for _ in range(50):
                self._remove(self.name)
                if self.name not in os.listdir(self.base):
                    return
                time.sleep(LOOK_EVERY_S)  # the kernel has yet to let go of the last one


def memory_groups() -> list[tuple[str, str, str]]:
    """(folder of this process's group, file of the limit, file of events) of each hierarchy that counts memory."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "memory":
                found.append((f"/sys/fs/cgroup/memory{path}", "memory.limit_in_bytes", "memory.oom_control"))
            elif not controllers:
                found.append((f"/sys/fs/cgroup{path}".rstrip("/"), "memory.max", "memory.events"))
    return [entry for entry in found if os.path.exists(f"{entry[0]}/cgroup.procs")]
