# SPDX-License-Identifier: Apache-2.0
"""`sporeloom VERB`: the table, names of what is shipped, the doctor, and the built wheel elsewhere than the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module

import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, run, tool

from sporeloom.__main__ import main
from sporeloom.cli import COMMANDS, EXAMPLES, GROUPS, doctor
from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.shipped import CLUSTERS, RULES, shipped_names, shipped_or_file
from sporeloom.runtime import environment
from sporeloom.strategy.loader import load_strategy
from sporeloom.train.plain_text import TrainConfig


def sporeloom(*words):
    return run("-m", "sporeloom", *words)


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        ("train", {"data": "--packing", "optimizer": "--adam-beta2", "checkpoints": "--keep-last", "model": "--size"}),
        ("ppo", {"policy": "--kl-coef", "optimizer": "--adam-beta2", "adapters (LoRA)": "--lora-r"}),
        ("generate", {"text": "--prompt", "sampling": "--top-p", "parallelism": "--launch", "model": "--weights"}),
    ],
)
def test_help_has_the_flags_in_groups_what_is_special_first(verb, flags, capsys):
    with pytest.raises(SystemExit):
        import_module(f"sporeloom.cli.{verb}").main(["--help-all"])
    parts = re.split(r"(?m)^(\w.*):$", capsys.readouterr().out)
    groups = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(groups)[:2] == ["options", next(iter(flags))]
    assert "--" not in re.sub("--help(-all)?", "", groups["options"])  # every flag stands in one
    for group, flag in flags.items():
        assert f"  {flag} " in groups[group]


def flags_of(command, *words, capsys):
    with pytest.raises(SystemExit):
        import_module(f"sporeloom.cli.{command.replace('-', '_')}").main([*words])
    told = capsys.readouterr().out
    return re.findall(r"(?m)^  (--[\w-]+)", told), told


@pytest.mark.parametrize(
    "command",
    ["train", "sft", "ppo", "generate", "serve", "evaluate", "plan", "dry-run", "certify", "upcycle", "bench-serve"],
)
def test_help_shows_the_flags_that_most_runs_need_and_how_many_more_there_are(command, capsys):
    few, told = flags_of(command, "--help", capsys=capsys)
    every, _ = flags_of(command, "--help-all", capsys=capsys)
    assert len(few) <= 24 and set(few) < set(every)
    assert f"\n{len(every) - len(few)} more flags: --help-all\n" in told


def test_help_of_a_command_with_few_flags_shows_all(capsys):
    few, told = flags_of("score", "--help", capsys=capsys)
    assert len(few) > 5 and "--help-all" not in told


def test_help_lists_every_verb_and_loads_little():
    outcome = run("-X", "importtime", "-m", "sporeloom", "--help")
    assert outcome.code == 0
    assert [line.split()[0] for line in re.findall(r"(?m)^  \S.*", outcome.output)] == list(COMMANDS)
    loaded = {line.rpartition("|")[2].strip() for line in outcome.output.splitlines() if line.startswith("import time")}
    assert "sporeloom.cli" in loaded
    assert not loaded & {"mindspore", "numpy", "yaml", "argparse"}


def test_every_example_of_the_help_is_a_command_line_of_its_group(capsys):
    assert list(EXAMPLES) == list(GROUPS)
    for group, example in EXAMPLES.items():
        program, command, *words = example.split()
        assert program == "sporeloom" and command in GROUPS[group]
        if flags := {word for word in words if word.startswith("--")}:
            before = words[:1] if words[0] in ("lm-eval", "tokenize") else []
            assert flags <= set(flags_of(command, *before, "--help-all", capsys=capsys)[0])


def test_an_unknown_command_is_reported_with_what_is_near():
    with pytest.raises(ConfigError, match=r"unknown command trian; did you mean train.*see sporeloom --help"):
        main(["trian"])


@pytest.mark.parametrize(
    ("words", "near"),
    [(("plan", "lst"), "list"), (("plan", "validat", "x"), "validate"), (("dry-run", "expain", "x"), "explain")],
)
def test_an_unknown_subcommand_is_reported_with_what_is_near(words, near):
    with pytest.raises(ConfigError, match=rf"unknown subcommand {words[1]}; did you mean {near}"):
        main(words)


def test_what_is_shipped_is_found_by_name(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    named = load_strategy("pangu_2.6b_dp64_tp8")
    assert (named.mesh, named.source) == (load_strategy(CONFIGS / "pangu_2.6b_dp64_tp8.yaml").mesh, named.source)
    own = load_strategy(write("own.yaml", "mesh: {tp: 2}\nrules: decoder\n"))
    assert own.rules == load_strategy(CONFIGS / "pangu_tiny_tp2.yaml").rules
    assert shipped_or_file("h100", CLUSTERS) == CONFIGS / "clusters/h100.yaml"
    assert {"decoder", "experts"} <= set(shipped_names(RULES))
    for name, kind, hint in (("pangu_tiny_dp5", "", "dp4"), ("h10", CLUSTERS, "h100")):
        with pytest.raises(ConfigError, match=f"{name}: there is no such file, and no .* did you mean .*{hint}"):
            shipped_or_file(name, kind)
    with pytest.raises(
        ConfigError, match=r"own2.yaml:2: rules: there is no file .*decode, and no built-in rules of that name"
    ):
        load_strategy(write("own2.yaml", "mesh: {tp: 2}\nrules: decode\n"))


def test_the_doctor_names_what_is_missing(capsys, monkeypatch):
    outcome = sporeloom("doctor")
    assert outcome.code == 0, outcome.output
    assert [line.split()[1] for line in outcome.output.splitlines() if line][:-1] == list(doctor.CHECKS)
    assert outcome.output.endswith("nothing is missing\n")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(doctor, "CHECKS", {"Python": doctor.python, "msrun": doctor.msrun})
    assert main(["doctor"]) == 1
    assert "\nmissing, first of all: msrun: /nowhere/msrun is not there" in capsys.readouterr().out


def test_the_doctor_names_a_device_that_is_not_used_and_the_way_to_it(monkeypatch):
    monkeypatch.setattr(environment, "DEVICE_FILES", {os.devnull: "GPU"})
    with pytest.raises(doctor.UnusualError, match=rf"GPU \({os.devnull}\) that this MindSpore does not use: run `eval"):
        doctor.device()
    monkeypatch.setattr(environment, "DEVICE_FILES", {"/nowhere": "GPU"})
    assert doctor.device().startswith("CPU: ")
    order = list(doctor.CHECKS)
    assert order.index("device") < order.index("partitioner")  # a virtual device leaves CPUs alone to be found


TEXT = ROOT / "examples/small_town.txt"


def train_config(*words):
    return parse_args(TrainConfig, "", list(map(str, words)))


def test_a_run_file_gives_the_flags_and_the_command_line_wins(write):
    write("base.yaml", f"data: {TEXT}\nsteps: 7\nlearning_rate: 1e-3\nresume: true\n")
    path = write("run.yaml", "base: base.yaml\nsteps: 9\nbatch_size_ramp: [2, 2, 10]\n")
    config = train_config("--run", path, "--seed", 5)
    assert (config.steps, config.learning_rate, config.seed, config.data) == (9, 1e-3, 5, TEXT)
    assert (config.batch_size_ramp, config.resume) == ((2, 2, 10), True)
    config = train_config(f"--run={path}", "--steps", 3, "--no-resume")
    assert (config.steps, config.resume) == (3, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3\n", "run.yaml:1: stepz is unknown; did you mean steps?"),
        ("data: x\nsteps: many\n", "run.yaml:2: steps must be a whole number, got 'many'"),
        ("steps: 0\n", "run.yaml:1: steps must be at least 1, got 0"),
        ("base: run.yaml\n", "run.yaml:1: .*run.yaml is based on itself"),
        ("base: none.yaml\n", "none.yaml: cannot be read"),
        ("data: x\nlaunch: true\n", "run.yaml:2: launch is for the command line; give --launch"),
        ("run: other.yaml\n", "run.yaml:1: run is for the command line; name other run files by `base`"),
        ("steps: 3\n", "the following arguments are required: --data"),
    ],
)
def test_mistakes_of_a_run_file_are_told_with_their_lines(write, text, message):
    with pytest.raises(ConfigError, match=message):
        train_config("--run", write("run.yaml", text))


def test_a_run_is_repeated_by_its_own_configuration_and_compared(tmp_path, write, capsys):
    small = ("--data", TEXT, "--config", TWO_LAYERS, "--seq-len", 16, "--batch-size", 2)
    assert tool("tools/train.py", *small, "--steps", 2, "--output-dir", tmp_path / "a").code == 0
    again = ("--run", tmp_path / "a/config.json", "--output-dir", tmp_path / "b")
    assert tool("tools/train.py", *again).code == 0
    told = [(tmp_path / name / "metrics.jsonl").read_text() for name in "ab"]
    assert [json.loads(line)["loss"] for line in told[0].splitlines()] == [
        json.loads(line)["loss"] for line in told[1].splitlines()
    ]
    assert main(["config", "diff", str(tmp_path / "a/config.json"), str(tmp_path / "b/config.json")]) == 1
    assert capsys.readouterr().out == f"output_dir  {tmp_path}/a  ->  {tmp_path}/b\n"
    assert main(["config", "diff", "pangu_tiny_tp2", "pangu_tiny_tp4"]) == 1
    assert capsys.readouterr().out == "mesh.tp  2  ->  4\n"
    assert main(["config", "diff", "pangu_tiny_tp2", "pangu_tiny_tp2"]) == 0


@pytest.mark.slow
def test_a_wheel_works_without_the_repository(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("sporeloom", "pangu", "codegeex", "parallel_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    assert built.code == 0, built.output
    installed = run(*pip, "install", "--no-deps", "--target", site, next(tmp_path.glob("*.whl")))
    assert installed.code == 0, installed.output
    shutil.copy(ROOT / "examples/small_town.txt", tmp_path / "text.txt")
    shutil.copy(TWO_LAYERS, tmp_path / "two_layers.json")
    shutil.rmtree(source)

    def verb(*words):
        done = subprocess.run(
            [sys.executable, site / "bin/sporeloom", *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    small = ("--data", "text.txt", "--config", "two_layers.json", "--steps", 1, "--seq-len", 16, "--batch-size", 4)
    assert "pp 1 x dp 1 x tp 2 = 2" in verb("train", *small, "--strategy", "pangu_tiny_tp2", "--launch")
    assert "2 tokens" in verb(
        "generate", "--checkpoint", "out/latest/checkpoint", "--prompt", "the", "--max-new-tokens", 2
    )
    plan = "plan --model codegeex --size tiny --cluster h100 --devices 8 --global-batch-size 64 --out planned.yaml"
    assert "step s" in verb(*plan.split())
    assert load_strategy(tmp_path / "planned.yaml").mesh.size == 8
    assert "rank 1:" in verb("dry-run", "--strategy", "pangu_tiny_tp2", "--ranks", "1", "--fast")
    assert (tmp_path / "planned.yaml").read_text().count("rules: decoder\n") == 1
