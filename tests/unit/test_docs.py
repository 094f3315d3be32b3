# SPDX-License-Identifier: Apache-2.0
import re
import runpy

import pytest
from conftest import ROOT

import sporeloom
from sporeloom.cli import COMMANDS

GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in PAGES if "<!-- generated" in page(name)])
def test_a_generated_page_is_what_the_code_says(name):
    assert page(name) == GENERATE["filled"](page(name)), "run python docs/generate.py"


def test_every_generated_section_is_on_a_page():
    shown = [found for name in PAGES for _, found, _ in GENERATE["MARKED"].findall(page(name))]
    assert sorted(shown) == sorted(GENERATE["SECTIONS"])


def test_the_api_reference_has_all_that_the_package_exports():
    shown = re.findall(r"(?m)^## (\w+)$", page("docs/reference/python_api.md"))
    assert sorted([*shown, "__version__"]) == sorted(sporeloom.__all__)


def test_the_reference_of_the_commands_has_every_verb():
    shown = re.findall(r"(?m)^### sporeloom (\S+)$", page("docs/reference/cli.md"))
    assert shown == list(COMMANDS)


def test_the_reference_of_the_server_has_every_field_that_it_reads():
    modules = ("requests", "messages", "structured", "responses/request", "anthropic/request")
    code = "".join((ROOT / f"sporeloom/serve/{name}.py").read_text(encoding="utf-8") for name in modules)
    fields = set(re.findall(r'fields\.(?:take|number|integer|integers|refuse)\("(\w+)"', code))
    assert len(fields) > 20
    assert [name for name in sorted(fields) if f"`{name}" not in page("docs/reference/http_api.md")] == []


def test_the_reference_of_metrics_has_those_of_every_task():
    code = (ROOT / "sporeloom/nn/objectives.py").read_text(encoding="utf-8")
    names = set(re.findall(r'"([\w/]+)"', " ".join(re.findall(r"(?s)\n    metrics = \((.*?)\)\n", code))))
    assert len(names) > 10
    assert [name for name in sorted(names) if f"`{name}`" not in page("docs/reference/metrics.md")] == []


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "CONTRIBUTING.md", "parallel_configs/README.md"),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_every_file_a_page_names_exists(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for path in re.findall(
        r"(?:benchmarks|examples|tools|parallel_configs|docs|tests|sporeloom)/[\w./-]+\.(?:py|yaml|md|txt)", text
    ):
        assert (ROOT / path).exists() or path == "parallel_configs/my_dp2_tp2.yaml", path


@pytest.mark.parametrize("name", [name for name in PAGES if re.search("(?m)^```(sh|console)$", page(name))])
def test_a_how_to_page_says_how_much_time_and_memory_its_commands_take(name):
    stated = re.compile(
        r"\n\nThe commands of this page take .+ of processor time, and .+ GB in the largest process\.\n$"
    )
    assert not name.startswith("docs/how-to/") or stated.search(page(name)), (
        f"run python benchmarks/docs_pages.py {name}"
    )


def test_nothing_tells_a_user_to_install_a_stranger_from_a_registry():
    """Until it is published there, the name on a public registry is not ours: extras are installed from the folder."""
    shown = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "sporeloom").rglob("*.py")]
    from_registry = re.compile(r"pip3? install(?! -e)[^`\n]*\bsporeloom\b")
    assert not [str(path) for path in shown if from_registry.search(path.read_text(encoding="utf-8"))]
