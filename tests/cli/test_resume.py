# SPDX-License-Identifier: Apache-2.0
"""tools/train.py saving and going on: killed, told to stop, with damaged files, with nowhere to write; and the tools."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, in_process, msrun_env, run, tool
from safetensors.numpy import load_file

TEXT = ROOT / "examples" / "small_town.txt"
ARGUMENTS = ("--data", TEXT, "--config", TWO_LAYERS, "--seq-len", 32, "--learning-rate", 1e-3)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def train(out, *arguments):
    return tool("tools/train.py", *ARGUMENTS, "--output-dir", out, *arguments)


def start(out, *arguments):
    words = [sys.executable, "tools/train.py", *ARGUMENTS, "--output-dir", out, *arguments]
    return subprocess.Popen(
        [*map(str, words)], cwd=ROOT, env=msrun_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(path, seconds=150):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 6 steps with its state after 2, 4 and 6."""
    out = tmp_path_factory.mktemp("saved") / "out"
    outcome = train(out, "--steps", 6, "--save-every", 2, "--async-save")
    assert outcome.code == 0, outcome.output
    return out


@pytest.fixture
def again(saved, tmp_path):
    """The same, to go on from: the state after 6 steps is not there."""
    shutil.copytree(saved, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000006")
    return tmp_path / "out"


def test_a_killed_job_of_four_goes_on_alone_as_if_nothing_had_happened(saved, tmp_path):
    out = tmp_path / "out"
    job = start(
        out,
        "--steps",
        400,
        "--warmup-steps",
        0,
        "--decay-steps",
        6,
        "--save-every",
        2,
        "--strategy",
        CONFIGS / "pangu_tiny_dp2_tp2_zero.yaml",
        "--launch",
    )
    processes = [job]
    try:
        wait_for(out / "checkpoints" / "step-00000004")
        processes = [*psutil.Process(job.pid).children(recursive=True), job]
    finally:
        for process in processes:
            process.kill()
        job.wait(timeout=30)
        job.stdout.close()
    for folder in sorted((out / "checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(folder)
    outcome = train(out, "--steps", 6, "--resume")
    assert outcome.code == 0, outcome.output
    assert "resumed after step 4" in outcome.output
    assert losses(out) == pytest.approx(losses(saved), rel=1e-5)
    assert not list((out / "checkpoints").glob(".step-*"))


@pytest.mark.parametrize("launched", [(), ("--strategy", CONFIGS / "pangu_tiny_dp2.yaml", "--launch")])
def test_sigterm_saves_and_says_how_to_go_on(tmp_path, launched):
    out = tmp_path / "out"
    process = start(out, "--steps", 100000, "--batch-size", 2, *launched)
    wait_for(out / "metrics.jsonl")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    (folder,) = (out / "checkpoints").glob("step-*")
    done = int(folder.name[5:])
    assert f"stopped after step {done}; --resume continues from there" in output
    assert len(losses(out)) == done


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(again, saved):
    path = again / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    outcome = train(again, "--steps", 6, "--resume")
    assert outcome.code == 0, outcome.output
    assert f"skipped: {path}" in outcome.output
    assert "the content is not what was written" in outcome.output
    assert "resumed after step 2" in outcome.output
    assert losses(again) == losses(saved)
    assert (again / "checkpoints" / "damaged-step-00000004").exists()
    assert (again / "checkpoints" / "latest").read_text() == "step-00000002\n"


def test_without_a_sound_checkpoint_there_is_one_clear_message(again):
    shutil.rmtree(again / "checkpoints" / "step-00000002")
    (again / "checkpoints" / "step-00000004" / "rank-00000.safetensors").unlink()
    outcome = train(again, "--steps", 6, "--resume")
    assert outcome.code == 2
    assert "error: " in outcome.output
    assert "holds no complete checkpoint; the newest: " in outcome.output
    assert "rank-00000.safetensors: missing; it contains adam_m." in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size", "tiny", "--model", "codegeex", "--steps", 6), "model family was pangu, is codegeex"),
        (("--batch-size", 4, "--steps", 6), "data batch_size was 8, is 4"),
        (("--seed", 5, "--steps", 6), "data seed was 1, is 5"),
        (("--optimizer", "adamw", "--steps", 6), "optimizer name was adamw-original, is adamw"),
        (("--steps", 3), "4 steps are done, --steps 3 leaves none"),
    ],
)
def test_another_run_cannot_go_on_from_it(again, arguments, words):
    if "codegeex" in arguments:
        arguments = (*arguments, "--dropout", 0)
    outcome = train(again, *arguments, "--resume")
    assert outcome.code == 2, outcome.output
    assert words in outcome.output
    assert "Traceback" not in outcome.output
    assert (again / "checkpoints" / "step-00000004").exists()


def test_nothing_to_resume(tmp_path):
    outcome = train(tmp_path / "out", "--resume")
    assert outcome.code == 2
    assert "holds no checkpoint; start without --resume" in outcome.output


def test_a_longer_run_keeps_the_schedule_it_was_saved_with(again):
    outcome = train(again, "--steps", 8, "--save-every", 4, "--resume")
    assert outcome.code == 0, outcome.output
    schedules = [
        json.loads((again / "checkpoints" / name / "manifest.json").read_text())["state"]["schedule"]
        for name in ("step-00000004", "step-00000008")
    ]
    assert schedules[0] == schedules[1]
    assert schedules[0]["decay_steps"] == 6


def test_two_runs_do_not_mix_their_checkpoints(again):
    outcome = train(again, "--steps", 6, "--save-every", 3)
    assert outcome.code == 2
    assert (
        "contains checkpoints of an earlier run; continue it with --resume, or give another --output-dir"
        in outcome.output
    )


def test_nowhere_to_write(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("a file")
    outcome = train(tmp_path / "out", "--steps", 3, "--save-every", 1)
    assert outcome.code == 2
    assert f"error: {tmp_path}/out/checkpoints: no checkpoint can be written there" in outcome.output


def test_a_full_disk_leaves_the_older_checkpoints(again):
    """Files may not grow past 1 MB here, as on a disk that is full."""
    before = sorted(path.name for path in (again / "checkpoints").iterdir())
    words = [
        sys.executable,
        "tools/train.py",
        *ARGUMENTS,
        "--output-dir",
        again,
        "--steps",
        6,
        "--save-every",
        1,
        "--resume",
    ]
    done = subprocess.run(
        [*map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        env={**os.environ, "GLOG_v": "3"},
    )
    assert done.returncode == 2, done.stderr
    assert "the state of step 5 cannot be saved: File too large; older checkpoints are untouched" in done.stderr
    assert sorted(path.name for path in (again / "checkpoints").iterdir()) == before


def test_a_run_that_was_killed_before_its_model_was_written_is_finished(saved, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    shutil.rmtree(out / "checkpoint")
    (out / "checkpoint").write_text("in the way, as a full disk is")
    outcome = train(out, "--steps", 6, "--resume", "--save-every", 2)
    assert outcome.code == 2 and "Traceback" not in outcome.output
    state = out / "checkpoints" / "step-00000006"
    assert (
        f"error: {out}/checkpoint: the model cannot be written: a file, which no folder replaces; choose another name; "
        f"{state} has its state: make room, then give the same command with --resume to write it\n"
    ) in outcome.output
    (out / "checkpoint").unlink()
    outcome = train(out, "--steps", 6, "--resume")
    assert outcome.code == 0 and "resumed after step 6" in outcome.output, outcome.output
    assert losses(out) == losses(saved)
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*")) == ["step-0000000" + s for s in "246"]
    for path in (saved / "checkpoint").iterdir():
        assert (out / "checkpoint" / path.name).read_bytes() == path.read_bytes()


def test_a_disk_without_room_for_the_model_is_told_of_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    flags = ("--steps", 1, "--seq-len", 32, "--config", TWO_LAYERS, "--output-dir", tmp_path / "out")
    outcome = in_process("tools/train.py", "--data", TEXT, *flags, "--save-every", 1)
    assert outcome.code == 2 and not (tmp_path / "out" / "metrics.jsonl").exists()
    assert re.search(
        r"error: \S+/out: 5\.0 MB are free, the run writes at least 8\.3 MB of weights and states there; make room",
        outcome.output,
    )


def test_an_edited_state_is_not_gone_on_from(again):
    """One bit of the least learning rate, as a fault leaves it."""
    path = again / "checkpoints" / "step-00000004" / "manifest.json"
    path.write_text(path.read_text().replace('"min_learning_rate": 0.0', '"min_learning_rate": 8.0'))
    outcome = train(again, "--steps", 6, "--resume")
    assert outcome.code == 0 and f"skipped: {path}: not as it was written" in outcome.output, outcome.output
    assert "resumed after step 2" in outcome.output


def test_the_tools_reshard_inspect_and_export(again, tmp_path):
    source, there, back = again / "checkpoints", tmp_path / "there", tmp_path / "back"
    strategy = CONFIGS / "pangu_tiny_dp2_pp2_zero.yaml"
    for start_it, arguments in (
        (run, (source, there, "--strategy", strategy, "--verify")),
        (tool, (there, back, "--full", "--verify")),
    ):
        outcome = start_it("tools/reshard_checkpoint.py", *arguments)
        assert outcome.code == 0, outcome.output
        assert "111 hashes verified" in outcome.output
    assert len(list(there.glob("rank-*.safetensors"))) == 4
    outcome = tool("tools/checkpoint_info.py", there, "--diff", back)
    assert (outcome.code, outcome.output) == (0, "0 of 111 tensors differ\n")
    outcome = tool("tools/checkpoint_info.py", source, "--diff", source / "step-00000002")
    assert outcome.code == 1
    assert "entries differ, by" in outcome.output
    outcome = tool("tools/checkpoint_info.py", there, "--verify")
    assert "step 4, " in outcome.output
    assert "written under pp 2 x dp 2 x tp 1" in outcome.output
    assert "pangu_tiny_tp4" in outcome.output
    outcome = tool("tools/export_checkpoint.py", there, tmp_path / "model", "--max-shard-mb", 1)
    assert outcome.code == 0, outcome.output
    outcome = tool("tools/generate.py", "--checkpoint", tmp_path / "model", "--prompt", "小镇", "--max-new-tokens", 3)
    assert outcome.code == 0, outcome.output
    outcome = tool("tools/export_checkpoint.py", there, tmp_path / "model")
    assert outcome.code == 2
    assert "is there already" in outcome.output
    outcome = tool("tools/reshard_checkpoint.py", tmp_path, tmp_path / "x", "--full")
    assert outcome.code == 2
    assert "give a training checkpoint" in outcome.output


def test_a_spike_leads_back_and_the_steps_up_to_it_are_left_out(tmp_path):
    common = ("--steps", 30, "--learning-rate", 0.01)
    found = train(
        tmp_path / "a", *common, "--save-every", 3, "--rewind-at-spike", 1.2, "--spike-window", 8, "--keep-last", 3
    )
    assert found.code == 0, found.output
    left_out = re.findall(r"a spike of the loss; back to \S+/step-\d+, without steps (\S+)", found.output)
    assert left_out
    again = train(tmp_path / "b", *common, "--skip-steps", *left_out)
    assert again.code == 0, again.output
    steps = [json.loads(line)["step"] for line in (tmp_path / "b/metrics.jsonl").read_text().splitlines()]
    assert 0 < len(steps) < 30
    of_a = {metrics["step"]: metrics for metrics in map(json.loads, (tmp_path / "a/metrics.jsonl").open())}
    assert [of_a[step]["loss"] for step in steps] == pytest.approx(losses(tmp_path / "b"), rel=1e-6)


def test_no_checkpoint_holds_what_a_lost_step_left(tmp_path):
    """At this rate gradients are no numbers while the loss still is one."""
    diverging = ("--learning-rate", 1e8, "--optimizer", "sgd", "--max-grad-norm", 0, "--warmup-steps", 1)
    outcome = train(tmp_path, *diverging, "--steps", 12, "--save-every", 1, "--rewind-at-spike", 1e30)
    assert "a spike of the loss; back to" in outcome.output
    assert "of the loss; lower --learning-rate" in outcome.output
    shards = list((tmp_path / "checkpoints").rglob("*.safetensors"))
    assert shards
    for path in shards:
        for name, value in load_file(path).items():
            assert np.isfinite(value).all(), (path, name)


def test_momenta_of_muon_are_saved_and_go_on_on_two(tmp_path):
    muon = ("--optimizer", "muon", "--adam-epsilon", 1e-3, "--save-every", 2)
    outcome = train(tmp_path / "out", "--steps", 4, *muon)
    assert outcome.code == 0, outcome.output
    wanted, saved = losses(tmp_path / "out"), tmp_path / "out/checkpoints/step-00000004"
    tensors = json.loads((saved / "manifest.json").read_text())["tensors"]
    assert {f"adam_{moment}.embedding.word.weight" for moment in "mv"} < set(tensors)
    assert "adam_m.layers.0.mlp.up.weight" in tensors
    assert "adam_v.layers.0.mlp.up.weight" not in tensors
    shutil.rmtree(saved)
    words = (*ARGUMENTS, "--output-dir", tmp_path / "out", "--steps", 4, *muon, "--resume")
    two = tool("tools/train.py", *words, "--strategy", CONFIGS / "pangu_tiny_tp2.yaml", processes=2)
    assert two.code == 0, two.output
    np.testing.assert_allclose(losses(tmp_path / "out"), wanted, rtol=1e-5)
    changed = train(tmp_path / "out", "--steps", 5, *muon, "--resume", "--muon-momentum", 0.9)
    assert "optimizer muon_momentum was 0.95, is 0.9" in changed.output


def test_factored_moments_are_saved_and_go_on_on_two(tmp_path):
    factored = ("--optimizer", "adafactor-factored", "--learning-rate", 0.02, "--save-every", 2)
    outcome = train(tmp_path / "out", "--steps", 4, *factored)
    assert outcome.code == 0, outcome.output
    wanted = losses(tmp_path / "out")
    shutil.rmtree(tmp_path / "out/checkpoints/step-00000004")
    words = (*ARGUMENTS, "--output-dir", tmp_path / "out", "--steps", 4, *factored, "--resume")
    two = tool("tools/train.py", *words, "--strategy", CONFIGS / "pangu_tiny_dp2.yaml", processes=2)
    assert two.code == 0, two.output
    np.testing.assert_allclose(losses(tmp_path / "out"), wanted, rtol=1e-5)
    dp2 = ("--strategy", CONFIGS / "pangu_tiny_dp2.yaml", "--verify")
    done = tool("tools/reshard_checkpoint.py", tmp_path / "out/checkpoints", tmp_path / "resharded", *dp2)
    assert done.code == 0, done.output
