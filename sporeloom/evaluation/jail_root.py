# SPDX-License-Identifier: Apache-2.0
"""Namespaces and the root in which `jail` runs commands: mounts of Linux, made with the standard library alone."""

import ctypes
import os
import platform
import stat

from sporeloom.evaluation.system_calls import ARCHITECTURES, REFUSED

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 2, 4, 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 442, -100, 0x8000, 1, 2
INODES = 32768  # of the folder: each takes memory of the kernel

SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/libexec", "/usr/include", "/usr/share/nodejs", "/etc/ld.so.cache", "/etc/alternatives"),
)
"""Files of the host that every command sees, besides its toolchain."""
DEVICES = ("null", "full", "random", "urandom")  # not zero: mapped, it is memory that nobody counts

libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def check(result: int, what: str) -> None:
    """Raise the error of a call of the C library that failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    check(libc.mount(*texts, flags, data.encode()), f"mount {kind or source} on {target}")


def _set_tree_read_only(path: str) -> None:
    attributes = _MountAttributes(set=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    size = ctypes.sizeof(attributes)
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, ctypes.byref(attributes), size)
    check(result, f"mount_setattr {path}")


def enter_namespaces() -> None:
    """Create new namespaces: the next child is process 1 in them."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(flags if uid == 0 else flags | CLONE_NEWUSER), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build_root(needed: list[str], uid: int | None, disk_bytes: int, folder: str) -> int:
    """Make a root that contains only what is allowed, and leave the host's. Returns a handle of a /proc that may
    be written, which the new root does not have.

    `needed`: files and folders of the toolchain. `folder`: made empty, of the user `uid`.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)  # in which our open files have names
    proc = os.open("/proc", os.O_RDONLY)
    opened = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in _outermost([*SYSTEM, *needed])}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    root = "/tmp"  # any folder will do: what is under it was opened before
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=16m")
    for path, handle in opened.items():
        _show(handle, path, root + path)
    for name in ("etc", "dev", "proc", folder.strip("/")):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    with open(f"{root}/etc/passwd", "w") as file:
        user = os.getuid() if uid is None else uid
        file.write(f"user:x:{user}:{user}::{folder}:/bin/sh\n")
    _set_tree_read_only(root)
    _mount("tmpfs", f"{root}/dev", "tmpfs", MS_NOSUID, "mode=0755,size=1m")
    for name, handle in devices.items():
        _show(handle, "", f"{root}/dev/{name}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    _set_tree_read_only(f"{root}/dev")
    owner = "" if uid is None else f",uid={uid},gid={uid}"
    _mount(
        "tmpfs", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes={INODES},mode=0700{owner}"
    )
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_RDONLY)
    for handle in (*opened.values(), *devices.values()):
        os.close(handle)
    os.chdir(root)
    check(libc.syscall(REFUSED["pivot_root"][ARCHITECTURES[platform.machine()][0]], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    return proc


def _outermost(paths: list[str]) -> list[str]:
    """The existing ones of these paths that are in no other one."""
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.lexists(path)}):
        if path != "/usr" and not any(path.startswith(f"{other}/") and not os.path.islink(other) for other in found):
            found.append(path)
    return found


def _show(handle: int, path: str, target: str) -> None:
    """Mount a file or folder of the host, opened before, at `target`: a link as a link."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    mode = os.fstat(handle).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink("", dir_fd=handle), target)
        return
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(f"/proc/self/fd/{handle}", target, None, MS_BIND | MS_REC)


def overlay(folder: str, overlays: dict[str, str]) -> None:
    """Mount, in `folder`, by name: folders whose content may be overwritten, without effect."""
    for name, source in overlays.items():
        parts = [os.path.join(folder, name + end) for end in ("", ".upper", ".work")]
        for part in parts:
            os.mkdir(part)
        target, upper, work = parts
        _mount("overlay", target, "overlay", 0, f"lowerdir={source},upperdir={upper},workdir={work}")
