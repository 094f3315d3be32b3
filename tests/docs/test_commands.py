# SPDX-License-Identifier: Apache-2.0
"""Every command of the README and of docs/, run in its order from the text itself, says what is stated there."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TWO_LAYERS, msrun_env, tool

from sporeloom.runtime.launch import free_port
from sporeloom.strategy.loader import load_strategy

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
SHOWN = ("python", "yaml", "text")
"""Languages of blocks that are read; `sh` and `console` are run. In `console` a command follows `$`, then what it says."""
DEEP_PAGES = [f"docs/how-to/{name}.md" for name in ("certify", "experts", "published_checkpoints")]
SHORT = [] if os.environ.get("DOCS_IN_FULL") else ["README.md", "docs/how-to/train.md", "docs/tutorials/first_model.md"]
"""Pages whose runs are long, so that models learn something: there each run has two steps, and what the model then answers
is not compared. With DOCS_IN_FULL=1 runs are as long as the page says, and answers are compared."""
SHALLOW = [*SHORT, *(page for page in PAGES if page.startswith("docs/how-to/") and page not in DEEP_PAGES)]
"""Pages whose commands do and say the same whatever the depth."""
DEEP = {"--run", "--random-ltd-min-value"}
"""But with these flags: a run's file says how many, and tokens are dropped between the first and the last of more."""
NUMBER = re.compile(r"\d[\d,.e+-]*")

pytestmark = pytest.mark.slow


def blocks(page):
    """(language, text) of the fenced blocks of a page."""
    return re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"))


ALONE = ("certify", "bisect", "tune")
"""Verbs that run in a process of their own; the latter has no file in tools, where it would hide Python's bisect."""


def commands(page):
    """(command, lines it is stated to say)"""
    for language, text in blocks(page):
        text = text.replace("\\\n", " ")
        if language == "sh":
            yield from ((line, []) for line in text.splitlines() if line.strip())
        elif language == "console":
            for part in re.split(r"(?m)^\$ ", text)[1:]:
                command, *stated = part.splitlines()
                yield command, [line for line in stated if line.strip() and line.strip() != "..."]


def perform(command, folder, page):
    """Exit code and output, as a shell would run it there. A verb runs in a warm process, or in as many as it would launch;
    what the README launches is launched. On SHALLOW pages models are trained with two layers."""
    words = shlex.split(command, comments=True)
    processes = 1
    if page in SHORT and "--steps" in words:
        words[words.index("--steps") + 1] = "2"
    if page in SHALLOW and words[:2] == ["sporeloom", "train"] and not DEEP & set(words):
        words += ["--config", str(TWO_LAYERS)]
    if "--launch" in words and "--strategy" in words and "--elastic" not in words and page != "README.md":
        processes = load_strategy(words[words.index("--strategy") + 1]).mesh.size
        words.remove("--launch")
    if words[0] == "sporeloom" and "--launch" not in words and words[1] not in ALONE:
        outcome = tool(f"tools/{words[1].replace('-', '_')}.py", *words[2:], cwd=folder, processes=processes)
        return outcome.code, outcome.output
    env = {**msrun_env(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    logs = sorted((folder / "out/logs").glob("worker_*.log")) if words[0] == "msrun" else []
    return done.returncode, done.stdout + done.stderr + "".join(path.read_text() for path in logs)


def without_numbers(text):
    return NUMBER.sub("#", text)


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))])
def test_the_commands_of_a_page_work_in_their_order(page, tmp_path):
    for name in ("examples", "parallel_configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "out").mkdir()
    port = str(free_port())  # for the server that a page starts
    with contextlib.ExitStack() as started:
        for command, stated in commands(page):
            if command.startswith("curl ") and shutil.which("curl") is None:
                continue
            if command.endswith("&"):
                start(command.replace("8000", port), tmp_path, started)
            else:
                command = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
                assert differences(page, command, stated, tmp_path) == []


def start(command, folder, started):
    """Start a server in the background, until `started` is closed; returns when it can be asked."""
    log = folder / "server.log"
    words = [sys.executable, "-m", *shlex.split(command.removesuffix("&"))]
    with log.open("w") as file:
        server = subprocess.Popen(words, cwd=folder, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    started.callback(server.wait, 60)
    started.callback(server.terminate)
    deadline = time.monotonic() + 120
    while "is served at" not in log.read_text():
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def differences(page, command, stated, folder):
    """What a command does otherwise than its page says. On a busy machine `calibrate` refuses, and says to try again."""
    for _ in range(4):
        code, output = perform(command, folder, page)
        if "run calibrate again while the machine is idle" not in output:
            break
    differs = command.startswith("sporeloom config diff")  # as diff does, it says so by its exit code
    fails = differs or any(line.startswith("error: ") for line in stated)
    said = without_numbers(output)
    if page in SHORT and command.startswith("sporeloom generate"):
        stated = []
    found = [] if (code != 0) == fails else [f"{command}\nends with {code}\n{output}"]
    missing = (line for line in stated if without_numbers(line.removesuffix("...").rstrip()) not in said)
    return found + [f"{command}\ndoes not say: {line}\n{output}" for line in missing]


OUTPUTS = ("--out", "--output-dir", "--output", "--html", "--logits-out", "--config-out", "--save-result")
"""Flags that name what a command writes."""


def test_no_two_commands_of_any_pages_write_to_the_same_name():
    """All of them can be run in one folder, one after another."""
    written = {}
    for page in PAGES:
        for command, _ in commands(page):
            words = shlex.split(command.removesuffix("&"), comments=True)
            for flag, name in itertools.pairwise(words):
                if flag in OUTPUTS and "--resume" not in words:
                    written.setdefault(name, []).append(f"{page}: {command}")
    assert len(written) > 20
    assert {name: where for name, where in written.items() if len(where) > 1} == {}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    assert {language for language, _ in blocks(page)} <= {"sh", "console", *SHOWN}


def test_the_readme_is_short_and_most_of_what_it_shows_runs():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 120
    assert len(list(commands("README.md"))) >= 7
    assert len(PAGES) >= 9
