# SPDX-License-Identifier: Apache-2.0
"""Answers are JSON, whatever they hold and however long their lists are."""

import json

import pytest

from sporeloom.serve.json_response import JsonResponse

ANSWERS = [
    {},
    {"data": [], "model": "m"},
    {"data": [{"index": 0, "embedding": [0.5, -1e-9]}, {"index": 1, "embedding": "AAA="}], "usage": {"tokens": 3}},
    {'a"b': ["\ud800", None, True, [1, [2]]], "ü": "\u2028"},
    [1, {"a": [2]}],
    "text",
    None,
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_the_json_of_its_value(answer):
    body = JsonResponse(answer).body
    assert body.isascii() and json.loads(body) == answer and b": " not in body


def test_numbers_that_json_has_not_are_null():
    assert JsonResponse({"x": [float("nan"), 1.0], "y": float("inf")}).body == b'{"x":[null,1.0],"y":null}'
