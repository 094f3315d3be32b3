# SPDX-License-Identifier: Apache-2.0
"""The house's rules about who may import whom, and what a model may know."""

import ast
import re
import subprocess
import sys
from collections import Counter

import pytest
from conftest import ROOT

from sporeloom.cli import COMMANDS

EVERYWHERE = {"core", "mindspore_compat", "models"}
"""What the packages below them may import, beside those in their own line."""
BASE = {"core": set(), "mindspore_compat": {"core"}, "models": {"core"}}
PACKAGES = {
    "nn": set(),
    "strategy": set(),
    "dialects": {"strategy"},
    "planner": {"strategy"},
    "calibration": {"partition", "planner", "runtime"},
    "simulation": set(),
    "align": set(),
    "data": set(),
    "parallel": {"strategy"},
    "partition": {"strategy"},
    "runtime": {"parallel", "partition", "strategy"},
    "checkpoint": {"data", "parallel", "strategy"},
    "train": {"align", "checkpoint", "data", "nn", "parallel", "planner", "runtime", "strategy"},
    "inference": {"checkpoint", "data", "nn", "parallel", "runtime", "strategy"},
    "tasks": {
        "align",
        "checkpoint",
        "data",
        "evaluation",
        "inference",
        "nn",
        "parallel",
        "planner",
        "runtime",
        "strategy",
        "train",
    },
    "evaluation": {"align", "data", "inference", "runtime"},
    "serve": {"checkpoint", "data", "dry_run", "inference", "planner", "runtime", "strategy"},
    "dry_run": {"nn", "parallel", "partition", "planner", "runtime", "strategy", "tasks", "train"},
    "certification": {"data", "dry_run", "parallel", "partition", "planner", "runtime", "strategy", "tasks", "train"},
    "strategy_search": {
        "certification",
        "dry_run",
        "parallel",
        "partition",
        "planner",
        "runtime",
        "simulation",
        "strategy",
    },
    "integrations": {"checkpoint", "data", "dialects", "inference", "runtime", "strategy", "train"},
}
PACKAGES["cli"] = set(PACKAGES)
ALLOWED = BASE | {package: EVERYWHERE | below for package, below in PACKAGES.items()}
FAMILIES = ("pangu", "codegeex", "palm")


def modules(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package):
    for path in modules(f"sporeloom/{package}"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "sporeloom" and len(parts) > 1 and parts[1] != package:
                assert parts[1] in ALLOWED[package], f"{path.name} imports {name}"
            assert parts[0] not in FAMILIES, f"{path.name} imports the family {name}"


def test_checkpoints_are_written_and_resharded_in_one_process():
    for path in modules("sporeloom/checkpoint"):
        assert "ProcessPool" not in path.read_text(encoding="utf-8"), path
        assert not {"multiprocessing", "subprocess"} & {*imports(path)}, path


PROBED = {
    **dict.fromkeys(("reason", "position", "lineno", "errno", "stderr", "strerror", "tag"), "of others' exceptions"),
    **dict.fromkeys(("sched_getaffinity", "renameat2", "prctl", "MADV_HUGEPAGE", "CSafeLoader"), "not everywhere"),
    **dict.fromkeys(("__qualname__", "__html__", "__self__", "__ms_class__", "__members__", "__dict__"), "Python's"),
    **dict.fromkeys(("fs", "limit", "body_bytes", "bool_"), "of other packages"),
    **dict.fromkeys(("weights", "name", "training", "dtype", "num_kv_heads"), "of MindSpore's and users' objects"),
    "parallel_report": "of networks that were made parallel, users' own among them",
    "axes": "of the values of some operators",
}
"""Attributes that are looked for by name, and why no class declares them."""


def test_attributes_are_declared_and_not_probed():
    probe = re.compile(r"\b(?:getattr|hasattr)\((?:[^()\"]|\([^()\"]*\))*, \"(\w+)\"")
    found = {name for path in modules("sporeloom") for name in probe.findall(path.read_text(encoding="utf-8"))}
    assert found == PROBED.keys()


BACKENDS = {"by_mindspore": {"spmd"}, "spmd": set(), "cpu": {"spmd"}}
"""Package of the runtime -> the others that it may use."""


def test_only_the_engine_chooses_between_backends():
    for path in modules("sporeloom/runtime"):
        used = {name.split(".")[2] for name in imports(path) if name.startswith("sporeloom.runtime.")}
        own = path.parent.name
        if own in BACKENDS:
            assert not used & (BACKENDS.keys() - BACKENDS[own] - {own}), path
            assert "engine" not in used, path
        elif path.name != "engine.py":
            assert not used & (BACKENDS.keys() - {"spmd"}), path


def test_private_names_of_mindspore_stand_in_one_module():
    private = re.compile(
        r"mindspore[\w.]*\._|from mindspore[\w.]* import .*\b_|mind_ir_pb2|mindspore\.nn\.layer|nn_func"
    )
    for path in [path for package in ("sporeloom", *FAMILIES) for path in modules(package)]:
        if path.parent.name != "mindspore_compat":
            text = path.read_text(encoding="utf-8")
            lines = [line for line in text.splitlines() if re.match(r"\s*(from|import) mindspore", line)]
            assert not [line for line in lines if private.search(line)], path


INTERNAL_JSON = (
    *(
        "runtime/*",
        "runtime/cpu/*",
        "runtime/spmd/*",
        "certification/*",
        "data/*",
        "core/locks.py",
        "core/json_text.py",
        "integrations/trainer.py",
    ),
    "core/bounded_process.py",
    *("evaluation/config.py", "evaluation/jail.py", "evaluation/sandbox.py", "evaluation/rpc/rpc.py"),
    "checkpoint/adapters.py",
    *("checkpoint/huggingface.py", "checkpoint/model_folder.py", "checkpoint/sharded.py", "checkpoint/tensor_files.py"),
)
"""Where JSON goes from process to process, is a document that came as JSON, or holds configurations: finite numbers."""


def test_what_others_read_as_json_is_written_by_one_writer_that_knows_no_nan():
    for path in modules("sporeloom"):
        if not any(path.match(f"sporeloom/{pattern}") for pattern in INTERNAL_JSON):
            assert not re.search(r"\bjson\.dumps?\(", path.read_text(encoding="utf-8")), (
                f"{path}: write it by json_text"
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_imports_only_model_parts(family):
    allowed = tuple(f"sporeloom.{name}" for name in ("nn", "data", "models", "core"))
    for path in modules(family):
        for name in imports(path):
            if name.split(".")[0] == "sporeloom":
                assert name.startswith(allowed), f"{path} imports {name}"
            assert name.split(".")[0] == family or name.split(".")[0] not in FAMILIES


@pytest.mark.parametrize("folder", [*FAMILIES, "sporeloom/nn"])
def test_a_model_knows_no_parallel_word(folder):
    for path in modules(folder):
        names = {n.id for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Attribute)}
        names.discard("ParallelBlock")  # attention and MLP on one norm: the field calls such a layer so
        assert not [n for n in names if re.search(r"shard|mesh|(^|_)rank|stage|parallel", n, re.I)], path


@pytest.mark.parametrize(
    "module",
    [
        "sporeloom",
        "sporeloom.strategy.loader",
        "sporeloom.strategy.stages",
        "sporeloom.partition.propagate",
        "sporeloom.train.checks",
        "sporeloom.train.plain_text",
        "sporeloom.inference.config",
        "sporeloom.planner.report",
        "sporeloom.planner.validate",
        "sporeloom.dry_run.config",
        "sporeloom.dry_run.html",
        "sporeloom.certification.config",
        "sporeloom.certification.page",
        *(f"sporeloom.cli.{verb.replace('-', '_')}" for verb in COMMANDS),
        "pangu.config",
    ],
)
def test_strategies_and_checks_load_no_mindspore(module):
    code = f"import sys, {module}; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "path", [p for f in ("sporeloom", *FAMILIES, "tools", "tests", "examples") for p in modules(f)], ids=str
)
def test_every_file_has_a_licence_line_and_stays_readable(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert text.count("\n") <= 500


def test_a_tool_is_a_verb_and_nothing_more():
    verbs = {verb.replace("-", "_") for verb in COMMANDS}
    assert {path.stem for path in modules("sporeloom/cli")} == {*verbs, "__init__"}
    for path in modules("tools"):
        assert path.stem in verbs
        assert path.stem not in sys.stdlib_module_names  # it would hide that module from all tools
        assert path.read_text(encoding="utf-8").count("\n") <= 10


def test_no_two_test_modules_have_one_name():
    """pytest imports them by it, and would run one of them alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert not [name for name, count in names.items() if count > 1]
