# SPDX-License-Identifier: Apache-2.0
"""What a release consists of: one version, a changelog in its form, typed packages, an image, templates and hooks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

import sporeloom

VERSION = sporeloom.__version__
GROUPS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
PACKAGES = ("sporeloom", "pangu", "codegeex", "palm")
PYTHONS = ("3.10", "3.11", "3.12")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_written_in_one_place_and_cited_and_logged():
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    project = read("pyproject.toml")
    assert 'dynamic = ["version"]' in project and 'version = { attr = "sporeloom.__version__" }' in project
    assert not re.search(r'^version = "', project, re.M)
    citation = yaml.safe_load(read("CITATION.cff"))
    newest, date = re.findall(r"^## \[(.+?)\] - (\d{4}-\d{2}-\d{2})$", read("CHANGELOG.md"), re.M)[0]
    assert (newest, date) == (VERSION, str(citation["date-released"]))
    assert str(citation["version"]) == VERSION


def test_the_changelog_has_releases_with_groups_of_short_lines():
    _, *releases = re.split(r"^## ", read("CHANGELOG.md"), flags=re.M)
    assert releases
    for release in releases:
        heading, _, body = release.partition("\n")
        assert re.fullmatch(r"\[(\d+\.\d+\.\d+|Unreleased)\]( - \d{4}-\d{2}-\d{2})?", heading), heading
        groups = re.findall(r"^### (.+)$", body, re.M)
        assert groups == [name for name in GROUPS if name in groups] and groups
        entries = re.split(r"^- ", body, flags=re.M)[1:]
        assert all(len(entry.split("\n\n")[0]) < 400 for entry in entries)


def test_every_package_has_type_information_that_the_wheel_takes_along():
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        assert f'"{package}*"' in read("pyproject.toml")
    assert '"*" = ["py.typed"' in read("pyproject.toml")


INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}


def instructions():
    """(name, arguments) of each instruction of the Dockerfile."""
    text = re.sub(r"\\\n", " ", read("Dockerfile"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_the_image_is_built_from_files_that_exist_and_runs_the_command_as_a_user():
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM" and re.fullmatch(r"python:3\.1[012]-slim", found[0][1])
    copied = [source for name, words in found if name == "COPY" for source in words.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    assert {*PACKAGES, "parallel_configs", "pyproject.toml"} <= {*copied}
    ignored = read(".dockerignore").split()
    assert not {*copied} & {*ignored}
    names = [name for name, _ in found]
    assert names.index("USER") < names.index("ENTRYPOINT") and ("ENTRYPOINT", '["sporeloom"]') in found


def test_hooks_before_a_commit_are_the_checks_of_ci():
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    entries = [hook["entry"].replace(".venv/bin/", "") for hook in hooks]
    recipe = read("Makefile").partition("\nlint:")[2].partition("\n\n")[0]
    lint = [line.strip().replace("$(BIN)/", "") for line in recipe.splitlines()[1:]]
    assert [*map(str.strip, (line.removesuffix(" .") for line in lint))] == entries[: len(lint)]
    jobs = read(".ci/run").partition("\nmake --jobs")[2].partition("\n")[0].split()
    assert {"lint", "docs"} <= set(jobs)
    assert "generate.py --check" in read("Makefile") and entries[len(lint) :] == ["python docs/generate.py --check"]


@pytest.mark.parametrize("name", ["ISSUE_TEMPLATE/bug_report.md", "ISSUE_TEMPLATE/feature_request.md"])
def test_a_template_of_an_issue_has_a_name_and_a_purpose(name):
    _, head, body = read(f".github/{name}").split("---\n", 2)
    assert {"name", "about", "labels"} <= yaml.safe_load(head).keys() and "**" in body


def test_files_that_a_project_on_a_forge_has_are_there():
    for name in ("LICENSE", "SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        assert len(read(name)) > 100, name


def interpreter(version):
    """A Python of this version on this machine, or None."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else shutil.which(f"python{version}")


@pytest.mark.parametrize("version", PYTHONS)
def test_a_python_that_is_supported_reads_all_sources_and_starts_the_command(version):
    assert f"Python :: {version}" in read("pyproject.toml")
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    code = "import ast, pathlib, sys; [ast.parse(pathlib.Path(path).read_text('utf-8')) for path in sys.argv[1:]]"
    sources = [path for folder in (*PACKAGES, "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    done = subprocess.run([python, "-c", code, *sources], cwd=ROOT, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    done = subprocess.run([python, "-m", "sporeloom", "--version"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"sporeloom {VERSION}"), done.stderr
