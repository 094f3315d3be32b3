# SPDX-License-Identifier: Apache-2.0
"""Bad input to every tool, in this process: clear lines, exit code 2, no traceback, nothing written."""

import dataclasses
import importlib
from typing import get_type_hints

import pytest
from conftest import CONFIGS, ROOT, in_process

from sporeloom.core.numbers import Bounds
from sporeloom.core.reader import get_args, get_origin

TEXT = str(ROOT / "examples" / "small_town.txt")
CLUSTER = str(CONFIGS / "clusters" / "ascend910b.yaml")
STRATEGY = str(CONFIGS / "pangu_tiny_dp2_tp2.yaml")
PLAN = (
    "plan",
    "--model",
    "pangu",
    "--size",
    "tiny",
    "--cluster",
    CLUSTER,
    "--devices",
    "4",
    "--global-batch-size",
    "8",
)
TRAIN, DRY_RUN = ("train", "--data", TEXT), ("dry_run", "--strategy", STRATEGY)
OUT_FLAGS = {"train": "--output-dir", "evaluate": "--output-dir"}


def refused(tmp_path, tool, *arguments):
    """The lines of a call that is refused, in a folder that stays empty."""
    before = sorted(tmp_path.rglob("*"))
    outcome = in_process(f"tools/{tool}.py", *arguments, cwd=tmp_path)
    said = outcome.output
    assert outcome.code == 2, said
    assert sorted(tmp_path.rglob("*")) == before
    lines = said.splitlines()
    assert lines
    assert all(line.startswith("error: ") and len(line) < 1000 for line in lines), said
    return said


CASES = [
    (TRAIN, ("--data", ""), "argument --data: an empty name"),
    (TRAIN, ("--data", "a\0b"), "holds a NUL character"),
    (TRAIN, ("--data", "none.txt"), "none.txt: there is no such file"),
    (TRAIN, ("--accumulate", 0), "--accumulate must be at least 1, got 0"),
    (TRAIN, ("--seq-len", 0), "--seq-len must be at least 1, got 0"),
    (TRAIN, ("--seq-len", -3), "--seq-len must be at least 1, got -3"),
    (TRAIN, ("--seed", -1), "--seed must be at least 0, got -1"),
    (TRAIN, ("--decay-steps", -5), "--decay-steps must be at least 1, got -5"),
    (TRAIN, ("--decay-steps", 0), "--decay-steps must be at least 1, got 0"),
    (TRAIN, ("--batch-size", 10**12), "--batch-size must be at most 2,147,483,647, got 1000000000000"),
    (TRAIN, ("--batch-size", 2**31 - 1), "tokens a step"),
    (TRAIN, ("--seq-len-growth", "64:1000000000000"), "steps"),
    (TRAIN, ("--learning-rate", "nan"), "--learning-rate must be a finite number, got nan"),
    (TRAIN, ("--learning-rate", "inf"), "--learning-rate must be a finite number, got inf"),
    (TRAIN, ("--max-grad-norm", "-1"), "--max-grad-norm must be at least 0, got -1.0"),
    (
        TRAIN,
        ("--optimizer", "adamx"),
        "(choose from adamw-original, adamw, muon, sgd, adafactor, adafactor-factored); did you mean adamw?",
    ),
    (TRAIN, ("--output-dir", "/proc/none/out"), "--output-dir /proc/none/out: no file can be written there"),
    (TRAIN, ("--output-dir", "x" * 300), "no file can be written there: File name too long"),
    (TRAIN, ("--output-dir", TEXT), "no file can be written there: Not a directory"),
    (TRAIN, ("--config", "none.json"), "none.json: cannot be read"),
    (TRAIN, ("--tokenizer", "none.model"), "none.model: there is no such tokenizer"),
    (TRAIN, ("--resume",), "--resume: out/latest is not there"),
    (TRAIN, ("--resume", "none"), "--resume: none/checkpoints holds no checkpoint; start without --resume"),
    (TRAIN, ("--from-checkpoint", "none"), "none: there is no such checkpoint folder"),
    (DRY_RUN, ("--memory-gb", "nan"), "--memory-gb must be a finite number"),
    (DRY_RUN, ("--jobs", 0), "--jobs must be at least 1"),
    (DRY_RUN, ("--ranks", "9"), "is not a rank"),
    (DRY_RUN, ("--html", "none/x.html"), "no file can be written there"),
    (PLAN, ("--devices", 100_000_000_000), "--devices must be at most 16,777,216, got 100000000000"),
    (PLAN, ("--devices", 0), "--devices must be at least 1, got 0"),
    (PLAN, ("--out", TEXT), "is there already"),
    (PLAN, ("--top", 0), "--top must be at least 1"),
    (("export_checkpoint", "none", "x"), (), "contains neither manifest.json"),
    (("export_checkpoint", "none", "x"), ("--max-shard-mb", "nan"), "--max-shard-mb must be a finite number"),
    (("checkpoint_info", ""), (), "an empty name"),
    (("reshard_checkpoint", "none", "x"), ("--full",), "contains neither manifest.json"),
    (("convert_checkpoint", "none", "x.npz"), ("--from", "ours", "--to", "megatron"), "none"),
    (("translate", "none.yaml"), ("--to", "ours"), "none.yaml"),
    (("translate", "none.yaml"), ("--to", "ours", "--devices", -1), "--devices must be at least 1"),
    (("score", "--checkpoint", "none", "--ids", "none.npy"), (), "none: there is no such checkpoint folder"),
    (("generate", "--checkpoint", "none", "--prompt", "x"), (), "none: there is no such checkpoint folder"),
    (("preprocess", "tokenize", TEXT, "--out", "x", "--tokenizer", "none"), (), "none: there is no such tokenizer"),
    (
        ("preprocess", "tokenize", TEXT, "--out", "x", "--tokenizer", TEXT),
        ("--workers", 0),
        "--workers must be at least 1",
    ),
    (
        ("preprocess", "tokenize", TEXT, "--out", "x", "--tokenizer", TEXT),
        ("--fim-rate", "nan"),
        "--fim-rate must be a finite",
    ),
    (
        ("preprocess", "filter", TEXT, "--out", "x.jsonl"),
        ("--min-letters", 2),
        "--min-letters must be in [0, 1], got 2.0",
    ),
    (("preprocess", "dedup", TEXT, "--out", "x"), ("--threshold", 0), "--threshold must be in (0, 1], got 0.0"),
    (("preprocess", "inspect", "--data", TEXT), ("--step", 10**12), "--step must be at most 10,000,000"),
    (
        ("evaluate", "humaneval-x", "--data", "x", "--output-dir", "y"),
        ("--time-limit", "inf"),
        "--time-limit must be a finite",
    ),
]


@pytest.mark.parametrize(("start", "more", "words"), CASES, ids=range(len(CASES)))
def test_a_mistake_is_one_clear_line(tmp_path, start, more, words):
    assert words in refused(tmp_path, *start, *more)


SEVERAL = [
    ((*TRAIN, "--steps", "many", "--batch-size", "few"), ["invalid int value: 'many'", "invalid int value: 'few'"]),
    (
        ("train", "--data", "none.txt", "--steps", 0, "--strategy", "none.yaml", "--learning-rate", "nan"),
        ["--steps must", "none.txt: there is", "none.yaml: cannot be read", "--learning-rate must"],
    ),
    (
        ("generate", "--checkpoint", "none", "--prompt", "x", "--top-p", 2, "--strategy", "none.yaml", "--logprobs"),
        ["none: there is no such", "--top-p must be", "none.yaml: cannot be read", "add --json"],
    ),
    (
        ("dry_run", "--strategy", "none.yaml", "--size", "huge", "--jobs", 0, "--html", "no/x.html"),
        ["none.yaml: cannot be read", "--size huge is unknown", "--jobs must be", "--html no/x.html"],
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), SEVERAL, ids=range(len(SEVERAL)))
def test_all_mistakes_of_a_call_come_at_once(tmp_path, arguments, expected):
    said = refused(tmp_path, *arguments)
    for words in expected:
        assert words in said


YAMLS = {
    "a recursive anchor": "mesh: &m {tp: 2, dp: *m}",
    "an unknown tag": "mesh: !!python/name:os.system {tp: 2}",
    "a bad date": "mesh: {tp: 2024-99-99}",
    "a NUL": "mesh: {tp: \0}",
    "depth": "mesh: " + "[" * 3000,
    "NaN weights": "mesh: {pp: 2}\npipeline: {num_microbatches: 2, stages: {weights: [.nan, 1]}}",
    "infinite weights": "mesh: {pp: 2}\npipeline: {num_microbatches: 2, stages: {weights: [.inf, 1]}}",
    "a negative weight": "mesh: {pp: 2}\npipeline: {num_microbatches: 2, stages: {weights: [-1, 1]}}",
    "a key twice": "mesh: {tp: 2, tp: 4}",
    "no mapping": "- 1",
    "nothing": "",
    "an absurd mesh": "mesh: {dp: 2000000000, tp: 2000000000}",
    "a number of thousands of digits": "mesh: {dp: " + "9" * 5000 + "}",
    "a rule of numbers": "mesh: {tp: 2}\nrules: {operators: {a: [[1, 2]]}}",
    "rules that are a folder": "mesh: {tp: 2}\nrules: .",
}
CLUSTERS = {
    "NaN": "chip: h100\nmemory_gb: .nan",
    "infinity": "chip: h100\nmemory_gb_per_s: .inf",
    "a negative": "chip: h100\npeak_tflops: -1",
    "a text": "chip: h100\npeak_tflops: fast",
    "a key twice": "chip: h100\nchip: h100",
    "NaN inside": "chip: h100\nefficiency: {matmul: .nan}",
    "an unknown field inside": "chip: h100\nefficiency: {matmull: 1}",
    "a recursive anchor": "chip: &c [*c]",
    "no chip": "memory_gb: 3",
}
SIZES = "num_layers: 2\nhidden_size: 8\nnum_heads: 2\nvocab_size: 8\n"
DIMENSIONS = {
    "NaN": SIZES + "seq_len: .nan",
    "a fraction": SIZES + "seq_len: 1.5",
    "zero": SIZES + "seq_len: 0",
    "absurd": SIZES + "seq_len: 99999999999999999999",
    "a key twice": SIZES + "seq_len: 8\nnum_layers: 3",
    "a date": SIZES + "seq_len: 2024-01-01",
}
CONFIGURATIONS = {
    "NaN": '{"dropout_rate": NaN}',
    "a key twice": '{"num_heads": 2, "num_heads": 4}',
    "a float for a count": '{"num_heads": 2.0}',
    "true for a count": '{"num_layers": true}',
    "null": '{"seq_len": null}',
    "a negative": '{"layer_norm_epsilon": -1}',
    "a list": "[1]",
    "depth": "[" * 100_000,
    "absurd": '{"hidden_size": 1e30}',
}


@pytest.mark.parametrize("text", YAMLS.values(), ids=YAMLS)
def test_a_malformed_strategy(tmp_path, write, text):
    path = write("s.yaml", text)
    for arguments in ((*TRAIN, "--strategy", path, "--launch"), ("dry_run", "--strategy", path)):
        if text or arguments[0] == "train":
            assert "s.yaml" in refused(tmp_path, *arguments) or not text


@pytest.mark.parametrize("text", YAMLS.values(), ids=YAMLS)
def test_a_malformed_file_to_translate(tmp_path, write, text):
    path = write("s.yaml", text)
    assert "error: " in refused(tmp_path, "translate", path, "--to", "mindformers1", "--dialect", "ours")


@pytest.mark.parametrize("text", CLUSTERS.values(), ids=CLUSTERS)
def test_a_malformed_cluster(tmp_path, write, text):
    assert "c.yaml" in refused(tmp_path, *PLAN, "--cluster", write("c.yaml", text))


@pytest.mark.parametrize("text", DIMENSIONS.values(), ids=DIMENSIONS)
def test_malformed_dimensions(tmp_path, write, text):
    path = write("d.yaml", text)
    start = ("plan", "--cluster", CLUSTER, "--devices", "4", "--global-batch-size", "8")
    assert "d.yaml" in refused(tmp_path, *start, "--config", path)


@pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_malformed_model_configuration(tmp_path, write, text):
    path = write("m.json", text)
    assert "m.json" in refused(tmp_path, *TRAIN, "--config", path)
    assert "m.json" in refused(tmp_path, *DRY_RUN, "--config", path)


RUNS = "id,source,note,model,layers,hidden,heads,seq,chip,devices,tp,pp,global_batch"
CSVS = {
    "without a column": RUNS.replace("note,", "") + "\n",
    "without rows": RUNS + "\n",
    "with a NUL": RUNS + "\n\0\n",
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("text", CSVS.values(), ids=CSVS)
def test_a_malformed_file_of_runs(tmp_path, write, text):
    assert "runs.csv" in refused(tmp_path, "plan", "validate", write("runs.csv", text))


CONFIGS_OF_TOOLS = [
    ("train", "sporeloom.train.plain_text", "TrainConfig", TRAIN),
    ("dry_run", "sporeloom.dry_run.config", "DryRunConfig", DRY_RUN),
    ("plan", "sporeloom.cli.plan", "PlanConfig", PLAN),
    ("inspect", "sporeloom.train.inspection", "InspectConfig", ("preprocess", "inspect", "--data", TEXT)),
    (
        "tokenize",
        "sporeloom.cli.preprocess",
        "TokenizeConfig",
        ("preprocess", "tokenize", TEXT, "--out", "x", "--tokenizer", TEXT),
    ),
    ("dedup", "sporeloom.cli.preprocess", "DedupConfig", ("preprocess", "dedup", TEXT, "--out", "x")),
    ("filter", "sporeloom.cli.preprocess", "FilterConfig", ("preprocess", "filter", TEXT, "--out", "x.jsonl")),
    (
        "evaluate",
        "sporeloom.evaluation.config",
        "EvaluateConfig",
        ("evaluate", "humaneval-x", "--data", "x", "--output-dir", "y", "--allow-execution"),
    ),
    ("generate", "sporeloom.inference.config", "GenerateConfig", ("generate", "--checkpoint", "none", "--prompt", "x")),
]


@pytest.mark.parametrize(("name", "module", "kind", "start"), CONFIGS_OF_TOOLS, ids=[c[0] for c in CONFIGS_OF_TOOLS])
def test_no_flag_of_any_tool_takes_a_number_that_is_none(tmp_path, name, module, kind, start):
    config = getattr(importlib.import_module(module), kind)
    for field in dataclasses.fields(config):
        hint = get_type_hints(config, include_extras=True)[field.name]
        bounds = [b for b in _bounds(hint) if isinstance(b, Bounds)]
        if not bounds or "positional" in field.metadata:
            continue
        flag = "--" + field.name.rstrip("_").replace("_", "-")
        is_whole = "float" not in str(hint)
        values = (
            [10**30, *([bounds[0].low - 1] if bounds[0].low > -1e300 else [])] if is_whole else ["nan", "inf", "-inf"]
        )
        for value in values:
            assert f"{flag} must be" in refused(tmp_path, *start, f"{flag}={int(value) if is_whole else value}")


def _bounds(hint):
    found = list(getattr(hint, "__metadata__", ()))
    return found + [b for part in (get_args(hint) if get_origin(hint) else ()) for b in _bounds(part)]
