# SPDX-License-Identifier: Apache-2.0
"""JSON that is written is JSON: no NaN, no infinity, whatever the numbers were."""

import json
import math

import numpy as np
import pytest

from sporeloom.core.json_text import json_text
from sporeloom.train.metrics import MetricsWriter, StepMetrics


def refuse(literal):
    raise AssertionError(literal)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        ({"a": math.inf, "b": [1.5, -math.inf, {"c": math.nan}]}, {"a": None, "b": [1.5, None, {"c": None}]}),
        ((1, (math.nan, "NaN")), [1, [None, "NaN"]]),
        ({math.nan: 1}, {"null": 1}),
        ([np.float64("nan"), np.float64(2)], [None, 2.0]),
        ({"x": [1e308, -0.0, 5e-324, True, None, "\u00e9"]}, {"x": [1e308, -0.0, 5e-324, True, None, "\u00e9"]}),
    ],
)
def test_a_number_that_is_none_is_null(value, expected):
    assert json.loads(json_text(value), parse_constant=refuse) == expected


def test_options_are_those_of_the_library():
    text = json_text({"b": math.nan, "a": "\u00e9"}, indent=1, sort_keys=True, ensure_ascii=False)
    assert text == '{\n "a": "\u00e9",\n "b": null\n}'


def test_every_line_of_a_run_whose_loss_becomes_nan(tmp_path):
    with MetricsWriter(tmp_path, 3) as writer:
        for step, loss in enumerate((2.5, math.nan, math.inf), 1):
            writer.write(StepMetrics(step, loss, 1e-3, None if step > 1 else 0.5, 0.1, 10.0, more={"kl": loss}))
    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [2.5, None, None] == [line["kl"] for line in lines]
    assert ["grad_norm" in line for line in lines] == [True, False, False]
