# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the flags of `sporeloom bisect`, which loads nothing for them."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from sporeloom.cli import bisect
from sporeloom.core.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("a", "b"), "a: has no recording; train with --record 2"),
        (("a", "b", "--tolerance", "-1"), "--tolerance must be in [0, 1], got -1.0"),
        (("a", "b", "--step", "-1"), "--step must be at least 0, got -1"),
    ],
)
def test_a_mistake_is_reported(tmp_path, monkeypatch, words, reported):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        bisect.main(words)
    assert reported in str(caught.value)


@pytest.mark.parametrize("verb", ["replay", "bisect"])
def test_threads_are_those_of_the_recording_before_numpy_is_loaded(tmp_path, verb):
    """NumPy's products of experts have other bits with another number of threads, which is read when it is loaded."""
    root = tmp_path / "record" / "rank-0"
    root.mkdir(parents=True)
    (root / "programs.json").write_text(json.dumps({"format": 0, "environment": {"OPENBLAS_NUM_THREADS": "17"}}))
    words = [str(tmp_path), "--step", "1"] if verb == "replay" else [str(tmp_path), str(tmp_path)]
    code = f"""
import os, sys
from sporeloom.cli import {verb}
class Finder:
    def find_spec(self, name, *_):
        if name == "numpy":
            print(os.environ.get("OPENBLAS_NUM_THREADS"))
sys.meta_path.insert(0, Finder())
try:
    {verb}.main({words!r})
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("17\n") and "was written in form 0" in done.stdout, done.stdout + done.stderr
