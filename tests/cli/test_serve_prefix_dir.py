# SPDX-License-Identifier: Apache-2.0
"""Blocks of prompts on disk, over HTTP: answers equal a cold start after a kill, and with other weights. Damaged files:
unit/inference/test_prefix_store.py."""

import contextlib
import os
import shutil
import signal
import time

import httpx
import pytest
from safetensors.numpy import load_file, save_file
from serving import serving

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.checkpoint.tensor_files import WEIGHTS
from sporeloom.core.hashes import write_hashes
from sporeloom.inference.cache import cache_bytes

pytestmark = pytest.mark.slow

PROMPTS = ["小镇的早晨" * 8, "早晨的小镇" * 8, "小镇很安静。" * 8]
BLOCK = 16


def ask(server):
    """Choices of all prompts, and the number of tokens that were cached."""
    found = [server.complete(prompt=each, max_tokens=8, seed=5, temperature=0.7, logprobs=2) for each in PROMPTS]
    cached = sum(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found)
    return [each["choices"] for each in found], cached


def kill_amid_an_answer(server):
    with contextlib.suppress(httpx.TransportError):
        body = {"prompt": PROMPTS[0], "max_tokens": 64, "seed": 1, "stream": True, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                os.kill(server.process.pid, signal.SIGKILL)
    assert server.process.wait(30) == -signal.SIGKILL


def files(folder):
    return sorted(folder.glob("*.block"))


def test_blocks_of_a_killed_server_and_those_of_other_weights(checkpoint, tmp_path):
    folder, other = tmp_path / "prompts", tmp_path / "other"
    of_block = BLOCK * cache_bytes(load_config(checkpoint)[1], 1, 1)
    words = ("--served-model-name", "town", "--prefill-chunk", BLOCK, "--prefix-cache-dir", folder)
    words += ("--prefix-cache-gb", 3.5 * of_block / 2**30)  # of which most blocks are on disk
    with serving(tmp_path / "log", checkpoint, *words) as server:
        cold, cached = ask(server)
        assert cached == 0
        deadline = time.monotonic() + 30
        while len(files(folder)) < 3:  # another thread writes
            assert time.monotonic() < deadline, files(folder)
            time.sleep(0.05)
        kill_amid_an_answer(server)
    assert folder.stat().st_mode & 0o777 == 0o700
    partial = folder / f".{files(folder)[0].stem}.partial"
    partial.write_bytes(b"half")
    with serving(tmp_path / "log2", checkpoint, *words) as server:
        warm, cached = ask(server)
        assert warm == cold and cached >= BLOCK and not partial.exists()
        assert server.stop() == 0 and "Traceback" not in server.said()
    shutil.copytree(checkpoint, other)
    weights = load_file(other / WEIGHTS)
    save_file({name: 1.5 * weight for name, weight in weights.items()}, other / WEIGHTS)
    write_hashes(other)
    with serving(tmp_path / "log3", other, *words) as server:
        found, cached = ask(server)
        assert cached == 0 and all(one != another for one, another in zip(found, cold, strict=True))
