# SPDX-License-Identifier: Apache-2.0
import re
import runpy

import pytest
from conftest import ROOT


def test_the_strategy_reference_is_the_one_generated_from_the_dataclasses():
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["reference"]()
    assert (ROOT / "docs" / "reference" / "strategy.md").read_text(encoding="utf-8") == generated, (
        "run python docs/generate.py"
    )


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


def test_nothing_tells_a_user_to_install_a_stranger_from_a_registry():
    """Until it is published there, the name on a public registry is not ours: extras are installed from the folder."""
    shown = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "sporeloom").rglob("*.py")]
    from_registry = re.compile(r"pip3? install(?! -e)[^`\n]*\bsporeloom\b")
    assert not [str(path) for path in shown if from_registry.search(path.read_text(encoding="utf-8"))]
