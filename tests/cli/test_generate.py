# SPDX-License-Identifier: Apache-2.0
"""tools/generate.py as users start it: alone, under msrun, with --launch, interactively; with bad input; interrupted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, in_process, msrun, msrun_command, msrun_env, run, tool

from sporeloom.core.hashes import write_hashes

PROMPT = "小镇的早晨"

pytestmark = pytest.mark.slow


def generate(checkpoint, *arguments):
    return tool("tools/generate.py", "--checkpoint", checkpoint, *arguments)


def start(*command, **options):
    return subprocess.Popen(
        [*map(str, command)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=msrun_env(),
        **options,
    )


def objects(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_json_tells_tokens_text_reason_times_and_bytes(checkpoint):
    outcome = generate(checkpoint, "--prompt", PROMPT, "--max-new-tokens", 12, "--json", "--logprobs")
    assert outcome.code == 0, outcome.output
    (found,) = objects(outcome.output)
    assert found["prompt"] == PROMPT
    assert found["finish_reason"] in ("length", "stop")
    assert len(found["tokens"]) == len(found["log_probabilities"]) <= 12
    assert found["prefill_s"] > 0
    assert found["time_per_token_s"] > 0
    assert found["cache_bytes"] == 2 * 2 * 128 * 128 * 4
    without = generate(checkpoint, "--prompt", PROMPT, "--max-new-tokens", 12, "--json", "--no-cache")
    (recomputed,) = objects(without.output)
    assert recomputed["tokens"] == found["tokens"]
    assert recomputed["cache_bytes"] == 0


def test_text_goes_to_stdout_alone(checkpoint):
    command = [sys.executable, "tools/generate.py", "--checkpoint", checkpoint, "--max-new-tokens", 8]
    process = start(*command)
    text, said = process.communicate(PROMPT, timeout=120)
    assert process.returncode == 0
    (expected,) = objects(generate(checkpoint, "--prompt", PROMPT, "--max-new-tokens", 8, "--json").output)
    assert text == expected["text"] + "\n"
    assert "8 tokens (length), prefill " in said
    assert len(said.splitlines()) == 1


def test_an_interactive_mode_answers_line_by_line_and_survives_a_text_too_long(checkpoint):
    command = [sys.executable, "tools/generate.py", "--checkpoint", checkpoint, "--interactive", "--max-new-tokens", 8]
    process = start(*command, "--temperature", 1, "--min-new-tokens", 8)
    text, said = process.communicate(f"{PROMPT}\n{'街' * 200}\n{PROMPT}\n", timeout=120)
    assert process.returncode == 0, said
    assert said.count("8 tokens (length)") == 2
    assert "fill the model's context" in said
    first, again = (part for part in text.replace("> ", "").splitlines() if part)
    assert first == again


def test_codegeex_learns_code_and_continues_it_in_its_language(tmp_path, write):
    text = "\n\n".join(
        (ROOT / "sporeloom" / f"{name}.py").read_text()
        for name in ("core/command_line", "core/errors", "core/files", "models/family")
    )
    arguments = (
        "--model",
        "codegeex",
        "--config",
        TWO_LAYERS,
        "--data",
        write("code.txt", text),
        "--steps",
        2,
        "--seq-len",
        32,
        "--batch-size",
        2,
    )
    outcome = tool("tools/train.py", *arguments, "--output-dir", tmp_path / "out")
    assert outcome.code == 0, outcome.output
    folder = tmp_path / "out" / "checkpoint"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "hashes.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    outcome = generate(folder, "--prompt", "def f(x):\n", "--language", "py", "--json", "--temperature", 1)
    assert outcome.code == 0, outcome.output
    (found,) = objects(outcome.output)
    assert found["prompt"] == "# language: Python\ndef f(x):\n"
    assert found["finish_reason"] == "stop"  # an untrained model leaves the function at once
    outcome = generate(folder, "--prompt", "a", "--language", "pyton")
    assert (outcome.code, "did you mean python?" in outcome.output) == (2, True)


def test_msrun_and_launch_give_the_tokens_of_one_device(checkpoint, tmp_path, write):
    prompts = write("prompts.jsonl", '{"prompt": "小镇的早晨"}\n{"prompt": "老人坐在河边\\n钓鱼"}\n')
    arguments = ("--checkpoint", checkpoint, "--prompt-file", prompts, "--max-new-tokens", 4, "--json")
    expected = [found["tokens"] for found in objects(tool("tools/generate.py", *arguments).output)]
    assert len(expected) == 2
    strategy = ("--strategy", CONFIGS / "pangu_tiny_tp2.yaml")
    outcome = msrun(2, tmp_path / "logs", ROOT / "tools/generate.py", *arguments, *strategy)
    assert outcome.code == 0, outcome.output
    assert [found["tokens"] for log in outcome.logs.values() for found in objects(log)] == expected
    outcome = run("tools/generate.py", *arguments, "--strategy", CONFIGS / "pangu_tiny_pp2.yaml", "--launch")
    assert outcome.code == 0, outcome.output
    assert [found["tokens"] for found in objects(outcome.output)] == expected
    assert "Start worker" not in outcome.output


def without_tokenizer(checkpoint, folder):
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("tokenizer.model"))
    write_hashes(folder)
    return folder


def with_small_vocabulary(checkpoint, folder):
    shutil.copytree(checkpoint, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "vocab_size": 100}))
    write_hashes(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--checkpoint", "nowhere"), ["nowhere: there is no such checkpoint folder"]),
        (("--checkpoint", "NO_TOKENIZER"), ["tokenizer.model: there is no such tokenizer; name one with --tokenizer"]),
        (("--checkpoint", "SMALL"), ["pieces do not fit the model's vocab_size 100"]),
        (("--temperature", "-1", "--top-p", "0"), ["--temperature must be at least 0", "--top-p must be in (0, 1]"]),
        (("--top-p", "1.2"), ["--top-p must be in (0, 1], got 1.2"]),
        (("--prompt", "街" * 300), ["--prompt: ", "fill the model's context of 128"]),
        (
            ("--prompt", "街" * 60),
            ["and --max-new-tokens 64 exceed the model's context of 128; use at most --max-new-tokens"],
        ),
        (("--prompt", ""), ["--prompt: contains no token"]),
        (("--prompt", b"\xe5\xb0"), ["--prompt: not UTF-8 text"]),
        (("--prompt-file", "nowhere.txt"), ["nowhere.txt: there is no such file"]),
        (("--prompt-file", "FOLDER"), ["cannot be read: Is a directory"]),
        (("--prompt-file", "BINARY"), ["binary.txt:2: not UTF-8 text"]),
        (("--prompt-file", "EMPTY"), ["empty.txt: contains no prompt"]),
        (("--prompt-file", "WRONG"), ["wrong.jsonl:1: no `prompt` field with a string; found: text"]),
        (("--prompt", "a", "--interactive"), ["--prompt, --prompt-file and --interactive exclude each other"]),
        (("--prompt", "a", "--strategy", "TP2"), ["tp 2", "1 process was launched"]),
        (("--prompt", "a", "--stop-ids", "5000"), ["--stop-ids: 5000 is outside the vocabulary of 2048"]),
        (("--prompt", "a", "--temprature", "1"), ["did you mean --temperature?"]),
        (("--prompt", "a", "--language", "python"), ["models of pangu have no tags for programming languages"]),
    ],
)
def test_bad_input_is_one_clear_line_each_and_exit_code_2(checkpoint, tmp_path, write, arguments, messages):
    places = {
        "NO_TOKENIZER": lambda: without_tokenizer(checkpoint, tmp_path / "no_tokenizer"),
        "SMALL": lambda: with_small_vocabulary(checkpoint, tmp_path / "small"),
        "FOLDER": lambda: tmp_path,
        "BINARY": lambda: write("binary.txt", b"good\n\xff\xfe\n"),
        "EMPTY": lambda: write("empty.txt", "\n\n"),
        "WRONG": lambda: write("wrong.jsonl", '{"text": "a"}\n'),
        "TP2": lambda: CONFIGS / "pangu_tiny_tp2.yaml",
    }
    given = [os.fsencode(places[a]()) if a in places else a for a in arguments]
    given = [os.fsdecode(a) for a in given]
    if "--checkpoint" not in given:
        given += ["--checkpoint", checkpoint]
    outcome = in_process("tools/generate.py", *given)
    assert outcome.code == 2, outcome.output
    for message in messages:
        assert message in outcome.output
    assert "Traceback" not in outcome.output
    assert all(line.startswith("error: ") for line in outcome.output.splitlines())


def test_no_prompt_at_all_is_an_error_too(checkpoint):
    outcome = generate(checkpoint)  # standard input is empty
    assert outcome.code == 2
    assert "standard input: contains no token" in outcome.output


@pytest.mark.parametrize("num_processes", [1, 2])
def test_ctrl_c_ends_every_process(checkpoint, tmp_path, write, num_processes):
    prompts = write("prompts.txt", f"{PROMPT}\n" * 400)
    arguments = ("tools/generate.py", "--checkpoint", checkpoint, "--prompt-file", prompts, "--batch-size", 2)
    if num_processes == 1:
        command = [sys.executable, *arguments]
    else:
        command = msrun_command(2, tmp_path / "logs", *arguments, "--strategy", CONFIGS / "pangu_tiny_dp2.yaml")
    process = start(*command, start_new_session=True)
    family = []
    try:
        deadline = time.monotonic() + 120
        log = tmp_path / "logs" / "worker_0.log"
        if num_processes == 1:
            assert process.stdout.readline().startswith("--- ")
            assert process.stdout.readline()
        else:
            while not (log.exists() and log.read_text().count("--- ") > 2):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        output, said = process.communicate(timeout=60)
        assert "Traceback" not in output + said
        if num_processes == 1:
            assert process.returncode == 130
            assert said.splitlines()[-1] == "interrupted"
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []
    finally:
        for member in family:
            if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                member.kill()
        if process.poll() is None:
            process.kill()
