# SPDX-License-Identifier: Apache-2.0
"""tools/train.py as users start it: alone, under msrun, with --launch; with bad input; with a worker killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from conftest import (
    CONFIGS,
    ROOT,
    TWO_LAYERS,
    call,
    fewer_microbatches,
    in_process,
    msrun,
    msrun_command,
    msrun_env,
    run,
    tool,
)
from safetensors.numpy import load_file

TEXT = ROOT / "examples" / "small_town.txt"
SMALL = ("--data", TEXT, "--config", TWO_LAYERS, "--steps", 6, "--seq-len", 32)

pytestmark = pytest.mark.slow


def is_alive(process):
    try:
        return (
            process.is_running() and process.status() != psutil.STATUS_ZOMBIE and "train.py" in str(process.cmdline())
        )
    except psutil.Error:
        return False


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "out"
    outcome = tool("tools/train.py", *SMALL, "--output-dir", out)
    assert outcome.code == 0, outcome.output
    return out


def test_rotary_positions_are_trained_in_bfloat16(tmp_path):
    found = []
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        flags = ("--size", "embedded_tiny", "--compute-dtype", dtype, "--steps", 2, "--seq-len", 32)
        outcome = tool("tools/train.py", "--data", TEXT, "--config", TWO_LAYERS, *flags, "--output-dir", out)
        assert outcome.code == 0, outcome.output
        found.append(losses(out))
    np.testing.assert_allclose(found[1], found[0], rtol=2e-3)
    assert found[1] != found[0]


def test_a_run_leaves_metrics_configuration_scalars_and_a_checkpoint(one_device):
    lines = [json.loads(line) for line in (one_device / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    own = {"step", "loss", "learning_rate", "grad_norm", "step_time_s", "tokens_per_s"}
    own |= {"compute_s", "data_s"}  # one device communicates nothing
    assert set(lines[0]) == {*own, "tokens_per_s_per_device", "flops_per_s_per_device"}
    assert all(0 < line["compute_s"] + line["data_s"] <= line["step_time_s"] + 1e-3 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    resolved = json.loads((one_device / "config.json").read_text())
    assert resolved["train"]["steps"] == 6
    assert resolved["resolved"]["seq_len"] == 32
    assert list((one_device / "tensorboard").iterdir())
    summary = json.loads((one_device / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["tokens"] == sum(
        round(line["tokens_per_s"] * line["step_time_s"]) for line in lines
    )
    assert set(summary["time_s"]) == {"compile", "data", "compute", "checkpoint", "other"}
    assert 0 < summary["goodput"] < 1 and summary["starts"] == 1
    assert summary["total_memory_bytes"] == summary["peak_memory_bytes"]  # of one process
    config = json.loads((one_device / "checkpoint" / "config.json").read_text())
    assert config["family"] == "pangu"
    assert (one_device / "checkpoint" / "tokenizer.model").stat().st_size > 0
    assert sum(v.size for v in load_file(one_device / "checkpoint" / "model.safetensors").values()) == 691_712


def test_a_chip_is_refused_where_there_is_none(tmp_path):
    outcome = tool("tools/train.py", *SMALL, "--output-dir", tmp_path / "out", "--chip", "h100")
    assert outcome.code == 2
    assert "--chip h100: this process computes on CPUs, whose peak is unknown; leave it out" in outcome.output
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_launch_trains_the_same_with_two_processes(one_device, write, tmp_path):
    out = tmp_path / "out"
    tokenizer = one_device / "checkpoint" / "tokenizer.model"
    strategy = write("zero.yaml", f"mesh: {{dp: 2}}\nrules: {CONFIGS}/rules/decoder.yaml\noptimizer_parallel: {{}}\n")
    graphs = tmp_path / "graphs"
    arguments = ("tools/train.py", *SMALL, "--tokenizer", tokenizer, "--strategy", strategy, "--output-dir")
    outcome = run(*arguments, out, "--launch", env={"SPORELOOM_CACHE": str(graphs)})
    assert outcome.code == 0, outcome.output
    np.testing.assert_allclose(losses(out), losses(one_device), rtol=1e-5)
    ours, theirs = (load_file(folder / "checkpoint" / "model.safetensors") for folder in (out, one_device))
    assert ours.keys() == theirs.keys()
    assert {name: v.shape for name, v in ours.items()} == {name: v.shape for name, v in theirs.items()}
    # The second run reads the graph that the first one kept, one for all ranks, and gives the same bits.
    used = {path.name: path.stat().st_mtime_ns for path in graphs.iterdir()}
    again = tmp_path / "again"
    outcome = tool(*arguments, again, processes=2, env={"SPORELOOM_CACHE": str(graphs)})
    assert outcome.code == 0, outcome.output
    assert {path.name for path in graphs.iterdir()} == used.keys()
    assert sum(path.stat().st_mtime_ns > used[path.name] for path in graphs.iterdir()) == 1
    assert losses(again) == losses(out)
    kept = load_file(again / "checkpoint" / "model.safetensors")
    assert all((kept[name] == value).all() for name, value in ours.items())


def test_msrun_trains_a_pipeline_and_scores_its_checkpoint(one_device, tmp_path):
    out = tmp_path / "out"
    strategy = fewer_microbatches(CONFIGS / "pangu_tiny_pp2.yaml", tmp_path)
    outcome = msrun(2, tmp_path / "logs", ROOT / "tools/train.py", *SMALL, "--output-dir", out, "--strategy", strategy)
    assert outcome.code == 0, outcome.output
    np.testing.assert_allclose(losses(out), losses(one_device), rtol=1e-5)
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.RandomState(0).randint(0, 2000, (4, 40)))
    arguments = ("--checkpoint", out / "checkpoint", "--ids", ids, "--logits-out")
    assert tool("tools/score.py", *arguments, tmp_path / "one.npy").code == 0
    outcome = tool("tools/score.py", *arguments, tmp_path / "two.npy", "--strategy", strategy, processes=2)
    assert outcome.code == 0, outcome.output
    np.testing.assert_allclose(np.load(tmp_path / "two.npy"), np.load(tmp_path / "one.npy"), rtol=0, atol=1e-5)


def test_steps_without_finite_gradients_are_skipped_up_to_a_bound(tmp_path):
    """The first update, by a rate of 1e30, leaves no finite loss."""
    more = ("--learning-rate", 1e30, "--warmup-steps", 0, "--max-skipped-steps", 2, "--output-dir", tmp_path / "out")
    outcome = tool("tools/train.py", *SMALL, *more)
    assert outcome.code != 0
    assert "step 4: loss nan, gradient norm nan, after 2 skipped steps" in outcome.output
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("grad_norm") is not None) for line in lines] == [(1, True), (2, False), (3, False)]


def test_mindspores_partitioner_is_refused_on_cpu_processes(tmp_path, write):
    strategy = write("s.yaml", "mesh: {dp: 2}\nrules: decoder\nengine: mindspore\n")
    outcome = tool("tools/train.py", *SMALL, "--strategy", strategy, "--output-dir", tmp_path / "out", processes=2)
    assert outcome.code == 2
    assert f"{strategy}:3: engine: MindSpore's partitioner is for Ascend and GPU devices" in outcome.output
    assert "Traceback" not in outcome.output


def test_a_second_run_into_the_same_folder_is_told_who_writes_there(tmp_path):
    out = tmp_path / "out"
    words = [*SMALL, "--steps", 100_000, "--output-dir", out]
    first = subprocess.Popen(
        [sys.executable, "tools/train.py", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not (out / ".writer").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = in_process("tools/train.py", *words)
        assert second.code == 2
        assert re.search(rf"error: .*out: process {first.pid} on .* writes there since .*tools/train.py", second.output)
    finally:
        first.kill()
        first.wait()


def test_a_run_with_dropout_repeats_itself(one_device, tmp_path):
    arguments = (*SMALL, "--dropout", 0.2, "--tokenizer", one_device / "checkpoint" / "tokenizer.model")
    for name in ("a", "b"):
        assert tool("tools/train.py", *arguments, "--output-dir", tmp_path / name).code == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(one_device)


def test_a_users_own_network_trains_the_same_with_one_line(tmp_path):
    script, runner = ROOT / "examples" / "own_network.py", ("tests/script_worker.py", "run")
    expected = re.findall(r"loss ([\d.]+)", call(*runner, script))
    assert len(expected) == 6
    assert sorted(expected, reverse=True) == expected  # it learns
    strategies = [ROOT / "examples" / f"own_network_{name}.yaml" for name in ("dp2_tp2", "pp2_dp2")]
    for strategy in strategies:  # README's own line, with msrun, is run by tests/docs
        said = "".join(call(*runner, script, strategy, processes=4))
        got = re.findall(r"loss ([\d.]+)", said)  # told once
        np.testing.assert_allclose(np.array(got, float), np.array(expected, float), rtol=0, atol=2e-6)


def test_the_norm_counts_parameters_whose_cut_was_derived_once(tmp_path, write):
    rules = (CONFIGS / "rules/decoder.yaml").read_text()
    write("rules.yaml", "".join(line for line in rules.splitlines(keepends=True) if "bias_add" not in line))
    strategy = ("--strategy", write("s.yaml", "mesh: {dp: 2, tp: 2}\nrules: rules.yaml\n"))
    norms = {}
    for processes, more in ((1, ()), (4, strategy)):
        out = tmp_path / str(processes)
        arguments = ("--data", TEXT, "--config", TWO_LAYERS, "--steps", 2, "--seq-len", 32, *more, "--output-dir", out)
        outcome = tool("tools/train.py", *arguments, processes=processes)
        assert outcome.code == 0, outcome.output
        norms[processes] = [json.loads(line)["grad_norm"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(norms[4], norms[1], rtol=1e-5)


@pytest.mark.parametrize(("name", "argument"), [("image_classifier", "dp=4"), ("own_loop", "tp")])
def test_the_other_examples_say_the_same_with_four_processes(name, argument):
    script, runner = ROOT / "examples" / f"{name}.py", ("tests/script_worker.py", "run")
    expected, said = call(*runner, script), "".join(call(*runner, script, argument, processes=4))
    numbers = r"\d+\.?\d*"
    assert len(re.findall("loss", expected)) == 6
    assert re.sub(numbers, "", said) == re.sub(numbers, "", expected)  # told once, in the same words
    got, wanted = (np.array(re.findall(numbers, text), float) for text in (said, expected))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere.jsonl"), "nowhere.jsonl: there is no such file"),
        (("--data", TEXT, "--stepz", 3), "unrecognized arguments: --stepz 3; did you mean --steps?"),
        (("--data", TEXT, "--steps", "many"), "argument --steps: invalid int value: 'many'"),
        (("--data", TEXT, "--size", "huge"), "--size huge is unknown"),
        (("--data", TEXT, "--strategy", "none.yaml"), "none.yaml: cannot be read"),
        (("--data", TEXT, "--batch-size", 6, "--strategy", CONFIGS / "pangu_tiny_dp4.yaml", "--launch"), "use 4 or 8"),
        (("--data", TEXT, "--strategy", CONFIGS / "pangu_tiny_dp4.yaml"), "4 processes, but 1 process was launched"),
        (
            ("--data", CONFIGS / "README.md", "--seq-len", 128, "--batch-size-ramp", 3, 4, 9),
            "is not a multiple of",
        ),
        (("--data", TEXT, "--batch-size-ramp", 4, 4), "give START INCREMENT COUNT"),
        (("--data", TEXT, "--seq-len-growth", "64"), "give LENGTH:STEPS, as in 256:1000"),
        (("--data", TEXT, "--seq-len-growth", "24:9"), "24 does not divide the final 128"),
    ],
)
def test_a_mistake_gives_its_message_and_exit_code_2(tmp_path, arguments, message):
    outcome = in_process("tools/train.py", *arguments, "--output-dir", tmp_path / "out")
    assert outcome.code == 2
    assert message in outcome.output
    assert "Traceback" not in outcome.output
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_rule_that_matches_nothing_is_named_with_its_line(tmp_path, write):
    base = f"mesh: {{tp: 2}}\nrules:\n  base: {CONFIGS / 'rules/decoder.yaml'}\n"
    strategy = write("s.yaml", base + "  operators:\n    mlp.up|upp.matmul: [[dp, ~], [tp, ~]]\n")
    outcome = run("tools/train.py", *SMALL, "--strategy", strategy, "--output-dir", tmp_path / "out", "--launch")
    assert outcome.code == 2
    assert "s.yaml:5: mlp.upp.matmul matches no operator" in outcome.output
    assert not (tmp_path / "out" / "checkpoint").exists()


def test_msrun_with_another_number_of_processes_fails_and_says_why(tmp_path):
    outcome = msrun(
        2,
        tmp_path / "logs",
        ROOT / "tools/train.py",
        *SMALL,
        "--output-dir",
        tmp_path / "out",
        "--strategy",
        CONFIGS / "pangu_tiny_dp4.yaml",
        timeout=60,
    )
    assert outcome.code != 0
    said = [log for log in outcome.logs.values() if log]  # msrun ends a rank that has not said it yet
    assert said
    for log in said:
        assert "4 processes, but 2 processes were launched" in log
        assert "Traceback" not in log
    assert not (tmp_path / "out").exists()


def kill_rank_1(folder):
    """Start a job of 2, kill one worker in the midst of it. Returns everything that was said; the job has ended by then."""
    out, logs = folder / "out", folder / "logs"
    arguments = (*SMALL, "--steps", 5000, "--output-dir", out)
    strategy = CONFIGS / "pangu_tiny_dp2.yaml"
    job = subprocess.Popen(
        msrun_command(2, logs, ROOT / "tools/train.py", *arguments, "--strategy", strategy),
        cwd=ROOT,
        env=msrun_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    workers = {}
    try:
        deadline = time.monotonic() + 120
        while not ((out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) > 3):
            assert time.monotonic() < deadline, "the job did not start"
            assert job.poll() is None
            time.sleep(0.2)
        for process in psutil.Process(job.pid).children(recursive=True):
            if is_alive(process) and process.environ().get("MS_ROLE") == "MS_WORKER":
                workers[process.environ()["RANK_ID"]] = process
        os.kill(workers["1"].pid, signal.SIGKILL)
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
        left = [process for process in workers.values() if is_alive(process)]
        for process in left:
            process.kill()
    assert left == []
    assert job.returncode != 0
    return output + "".join((logs / f"worker_{rank}.log").read_text() for rank in range(2))


def test_a_killed_worker_ends_the_job_and_is_named_with_its_last_step(tmp_path):
    # Every try must end the job. msrun looks each second whether a worker is gone and then kills the others at once: when
    # that falls into the instant before they speak, they cannot; so there are three tries at the message.
    said = ""
    for attempt in range(3):
        said += kill_rank_1(tmp_path / str(attempt))
        if "is gone" in said:
            break
    assert re.search(r"rank 1 is gone \(its last step was \d+\); ending this job", said)


def test_the_operator_that_made_the_first_nan_is_named(tmp_path):
    diverging = ("--learning-rate", 1e6, "--optimizer", "sgd", "--max-grad-norm", 0, "--steps", 9, "--find-nan")
    arguments = ("--data", TEXT, "--config", TWO_LAYERS, "--seq-len", 32, "--output-dir", tmp_path / "out")
    outcome = tool("tools/train.py", *arguments, *diverging, "--strategy", CONFIGS / "pangu_tiny_pp2.yaml", processes=2)
    assert outcome.code == 1
    told = re.findall(r"gradient norm nan; first not finite: (.*)", outcome.output)
    assert len(told) == 2, outcome.output
    assert re.fullmatch(r"\w+ of model\.\S+, (forward|backward) \(rank [01]\)", told[0])
    alone = tool("tools/train.py", *arguments, *diverging)
    assert "--find-nan reads graphs of CPU processes: give a --strategy with several" in alone.output
