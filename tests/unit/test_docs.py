# SPDX-License-Identifier: Apache-2.0
import re
import runpy

import pytest
from conftest import ROOT


def test_the_strategy_reference_is_the_one_generated_from_the_dataclasses():
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["reference"]()
    assert (ROOT / "docs" / "strategy.md").read_text(encoding="utf-8") == generated, "run python docs/generate.py"


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
        r"(?:examples|tools|parallel_configs|docs|tests|mindloom)/[\w./]+\.(?:py|yaml|md|txt)", text
    ):
        assert (ROOT / path).exists() or path == "parallel_configs/my_dp2_tp2.yaml", path
