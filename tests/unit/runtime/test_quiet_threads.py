# SPDX-License-Identifier: Apache-2.0
"""Idle threads of MindSpore sleep in CPU processes that share cores, and only there."""

import ctypes
import os
import shutil
from pathlib import Path

import farm
import pytest
from conftest import ROOT, run

from sporeloom.core import compiled
from sporeloom.mindspore_compat.symbols import library
from sporeloom.runtime import environment, quiet

NAMES = (
    "_ZN9mindspore10ThreadPool20SetSpinCountMaxValueEv",
    "_ZN9mindspore10ThreadPool27SetKernelThreadMaxSpinCountEi",
    "_ZN9mindspore10ThreadPool14ParallelLaunchERKSt8functionIFiPviffEES2_i",
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")


def owners_of_names():
    """For each name the file that a library of MindSpore is bound to, and the file of MindSpore that has it."""
    return [[_file_of(first, name) for first in (ctypes.CDLL(None), library("core"))] for name in NAMES]


class _Info(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


def _file_of(first, name):
    """Where a name is found from a library on; None: nowhere."""
    info = _Info()
    if not hasattr(first, name) or not ctypes.CDLL(None).dladdr(getattr(first, name), ctypes.byref(info)):
        return None
    return Path(info.file.decode()).name


@needs_compiler
def test_ranks_that_share_cores_have_the_functions_of_the_library():
    replaced = NAMES if os.cpu_count() < 2 * 4 else NAMES[:2]
    for of_rank in farm.call(__file__, "owners_of_names", processes=4):
        for bound, own in of_rank[: len(replaced)]:
            assert own == "libmindspore_core.so", "MindSpore has no such function any more: threads poll again"
            assert bound.endswith(".so") and bound != own


def test_one_process_alone_has_those_of_mindspore():
    show = "import mindspore, test_quiet_threads as test; print(*(bound for bound, _ in test.owners_of_names()))"
    script = f"from sporeloom.runtime.environment import prepare_environment; prepare_environment(); {show}"
    folders = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)])
    done = run("-c", script, env={"PYTHONPATH": folders, "MS_WORKER_NUM": "", "PYTEST_XDIST_WORKER": ""})
    assert done.output.split() == ["None"] * len(NAMES)


CASES = {
    # environment, devices of the machine -> whether a library is asked for
    "ranks of CPU": ({"MS_WORKER_NUM": "2"}, {}, True),
    "one process": ({"MS_WORKER_NUM": ""}, {}, False),
    "ranks of Ascend": ({"MS_WORKER_NUM": "2"}, {"Ascend": "/dev/davinci_manager"}, False),
    "ranks of GPUs": ({"MS_WORKER_NUM": "2"}, {"GPU": "/dev/nvidiactl"}, False),
    "switched off": ({"MS_WORKER_NUM": "2", quiet.SWITCH: "0"}, {}, False),
    "no compiler": ({"MS_WORKER_NUM": "2", "CC": "no-such-compiler"}, {}, False),
}


@needs_compiler
@pytest.mark.parametrize(("variables", "devices", "is_asked"), CASES.values(), ids=CASES)
def test_only_ranks_on_cpus_ask_for_the_library(monkeypatch, capsys, variables, devices, is_asked):
    asked = []

    def kept_or_built(compiler, source, flags):
        asked.append(source.name)
        raise OSError("not in a test")

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(quiet, "kept_or_built", kept_or_built)
    monkeypatch.setattr(environment, "devices", lambda: devices)
    quiet.quiet_threads.cache_clear()
    environment.prepare_environment()
    quiet.quiet_threads.cache_clear()
    assert asked == (["quiet_threads.c"] if is_asked else [])
    assert capsys.readouterr().err.count("\n") == len(asked)


@needs_compiler
def test_a_compiler_that_fails_is_named_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "bad.c").write_text("int f(\n")
    monkeypatch.setattr(quiet, "SOURCE", tmp_path / "bad.c")
    quiet.quiet_threads.cache_clear()
    assert not quiet.quiet_threads(1)
    quiet.quiet_threads.cache_clear()
    said = capsys.readouterr().err
    assert "bad.c cannot be used, processes that share cores are slower: " in said and said.count("\n") == 1
    assert list((tmp_path / "sporeloom/bad").iterdir()) == []


@needs_compiler
def test_a_library_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compiled.kept_or_built(compiled.c_compiler(), quiet.SOURCE, quiet.FLAGS)
    monkeypatch.setattr(compiled, "_build", None)
    assert compiled.kept_or_built(compiled.c_compiler(), quiet.SOURCE, quiet.FLAGS) == first
