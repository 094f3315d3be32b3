# SPDX-License-Identifier: Apache-2.0
"""tools/evaluate.py as users start it: judging, generating, continuing after a kill, on a mesh; with bad input."""

import gzip
import json
import signal
import subprocess
import sys
import time

import pytest
from conftest import CONFIGS, ROOT, tool

from sporeloom.core.errors import ConfigError
from sporeloom.evaluation.sandbox import check_isolation

try:
    check_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.slow

NUM_PROBLEMS = 4
GENERATION = ("--language", "python", "--temperature", 0.9, "--max-new-tokens", 12)


def problem(number):
    return {
        "task_id": f"Python/{number}",
        "prompt": f'def add{number}(x):\n    """Add {number}."""\n',
        "declaration": f"def add{number}(x):\n",
        "canonical_solution": f"    return x + {number}\n",
        "test": f"assert add{number}(1) == {number + 1}\n",
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A benchmark of a few problems; C++ has the same ones, for translations."""
    folder = tmp_path_factory.mktemp("data")
    lines = "".join(json.dumps(problem(n)) + "\n" for n in range(NUM_PROBLEMS))
    (folder / "humaneval_python.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    published = folder / "cpp" / "data"
    published.mkdir(parents=True)
    (published / "humaneval_cpp.jsonl.gz").write_bytes(gzip.compress(lines.replace("Python/", "CPP/").encode()))
    return folder


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A CodeGeeX checkpoint that has hardly learnt anything."""
    folder = tmp_path_factory.mktemp("coder")
    text = "\n\n".join(problem(n)["prompt"] + problem(n)["canonical_solution"] for n in range(200))
    (folder / "code.txt").write_text(text)
    (folder / "tiny.json").write_text(json.dumps({"num_layers": 2, "hidden_size": 64, "vocab_size": 512}))
    outcome = tool(
        *("tools/train.py", "--model", "codegeex", "--config", folder / "tiny.json", "--data", folder / "code.txt"),
        *("--steps", 4, "--batch-size", 4, "--seq-len", 32, "--output-dir", folder / "out"),
    )
    assert outcome.code == 0, outcome.output
    return folder / "out" / "checkpoint"


@pytest.fixture(scope="module")
def whole(data, coder, tmp_path_factory):
    """Where a run without a break has left its samples, judged."""
    out = tmp_path_factory.mktemp("whole") / "out"
    outcome = evaluate(data, out, "--checkpoint", coder, *GENERATION, "--num-samples", 3, "--allow-execution")
    assert outcome.code == 0, outcome.output
    return out


def evaluate(data, out, *arguments, **options):
    return tool("tools/evaluate.py", "humaneval-x", "--data", data, "--output-dir", out, *arguments, **options)


def samples(out):
    lines = (out / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return {(s["task_id"], s["sample"]): s["text"] for s in map(json.loads, lines)}


def test_the_benchmarks_own_solutions_score_100(data, tmp_path):
    outcome = evaluate(data, tmp_path / "out", "--canonical", "--allow-execution")
    assert outcome.code == 0, outcome.output
    assert "python           4        4       4  100.00" in outcome.output
    (summary,) = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["pass_at"] == {"1": 1.0}
    assert summary["outcomes"] == {"passed": 4}


def test_functions_in_answers_are_judged(data, tmp_path):
    """As models leave them that were asked in a conversation: three right, one wrong."""
    answers = {
        n: f"Sure:\n```python\ndef add{n}(x):\n    return x + {min(n, 2)}\n```\nDone." for n in range(NUM_PROBLEMS)
    }
    about = {"sample": 0, "language": "python", "translate_from": None, "prompt_form": "chat", "finish_reason": "stop"}
    lines = [json.dumps({"task_id": f"Python/{n}", **about, "text": text}) + "\n" for n, text in answers.items()]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    outcome = evaluate(data, tmp_path, "--allow-execution")
    assert outcome.code == 0, outcome.output
    assert "python           4        4       3   75.00" in outcome.output


def test_a_language_without_a_toolchain_is_skipped_in_words(data, tmp_path):
    (tmp_path / "humaneval_go.jsonl.gz").write_bytes((data / "humaneval_python.jsonl.gz").read_bytes())
    outcome = tool(
        *("tools/evaluate.py", "humaneval-x", "--data", tmp_path, "--output-dir", tmp_path / "out"),
        *("--language", "go", "--canonical", "--allow-execution"),
        env={"PATH": "/nonexistent"},
    )
    assert outcome.code == 0, outcome.output
    assert "go        skipped: no go" in outcome.output


def test_a_killed_run_goes_on_and_more_samples_may_be_asked_for(data, coder, whole, tmp_path):
    arguments = ("--checkpoint", coder, *GENERATION, "--num-samples", 3)
    cut = tmp_path / "cut"
    words = ["tools/evaluate.py", "humaneval-x", "--data", data, "--output-dir", cut, *arguments, "--batch-size", 1]
    process = subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (cut / "samples.jsonl").exists() or (cut / "samples.jsonl").stat().st_size < 300:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    content = (cut / "samples.jsonl").read_bytes()
    (cut / "samples.jsonl").write_bytes(content + b'{"task_id": "Python/3", "sam')  # as if killed while it wrote
    outcome = evaluate(data, cut, *arguments)
    assert outcome.code == 0, outcome.output
    assert "samples are there already" in outcome.output
    assert samples(cut) == samples(whole)
    assert len(samples(whole)) == 3 * NUM_PROBLEMS
    outcome = evaluate(
        data, cut, "--checkpoint", coder, *GENERATION, "--num-samples", 4, "--allow-execution", "--k", 1, 4
    )
    assert outcome.code == 0, outcome.output
    assert {key: text for key, text in samples(cut).items() if key[1] < 3} == samples(whole)
    assert "pass@4" in outcome.output
    assert len((cut / "results.jsonl").read_text().splitlines()) == 4 * NUM_PROBLEMS


def test_two_processes_make_the_samples_of_one(data, coder, whole, tmp_path):
    arguments = ("--checkpoint", coder, *GENERATION, "--num-samples", 3, "--allow-execution")
    strategy = CONFIGS / "pangu_tiny_dp2.yaml"
    outcome = evaluate(data, tmp_path / "two", *arguments, "--strategy", strategy, processes=2)
    assert outcome.code == 0, outcome.output
    assert samples(tmp_path / "two") == samples(whole)
    assert outcome.output.count("pass@1") == 1


def test_other_settings_do_not_mix_with_the_samples_that_are_there(data, coder, whole):
    outcome = evaluate(data, whole, "--checkpoint", coder, *GENERATION, "--top-p", 0.5)
    assert outcome.code == 2
    assert "top_p was 1.0, is 0.5; use another folder" in outcome.output


BAD = {
    "nothing to do": ((), "nothing to do: give --checkpoint"),
    "no such benchmark": (
        ("--data", "/nowhere", "--canonical", "--allow-execution"),
        "/nowhere: holds no humaneval_python",
    ),
    "unknown language": (("--language", "pyton", "--allow-execution"), "did you mean python?"),
    "greedy samples": (("--checkpoint", "x", "--num-samples", 5), "at temperature 0 are all the same"),
    "no checkpoint there": (("--checkpoint", "/nowhere"), "/nowhere: there is no such checkpoint folder"),
    "no samples": (("--allow-execution",), "there are no samples"),
    "both": (("--canonical", "--checkpoint", "x", "--allow-execution"), "leave out --checkpoint"),
    "into itself": (("--translate-from", "python", "--allow-execution"), "is one of the languages to write"),
    "time": (("--canonical", "--allow-execution", "--time-limit", -1), "--time-limit must be above 0"),
    "k": (("--canonical", "--allow-execution", "--k", 0), "--k must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_line(case, data, tmp_path):
    arguments, words = BAD[case]
    outcome = evaluate(data, tmp_path / "out", *arguments)
    assert outcome.code == 2, outcome.output
    assert words in outcome.output
    assert outcome.output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_knows_no_languages_is_told_none(data, checkpoint, tmp_path):
    outcome = evaluate(data, tmp_path / "out", "--checkpoint", checkpoint, "--prompt-form", "tagged")
    assert outcome.code == 2
    assert "models of pangu have no tags for programming languages" in outcome.output
