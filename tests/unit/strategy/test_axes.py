# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from sporeloom.models.family import size_config
from sporeloom.strategy.axes import AXES, BY_NAME, LAYOUT_AXES, ROWS
from sporeloom.strategy.checks import model_problems, sizes_of
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import strategy_of
from sporeloom.strategy.mesh import Mesh

FIELDS = {field.name for field in dataclasses.fields(Mesh)} - {"order"}
MODEL = size_config("pangu", "pro_moe_tiny")


def test_every_axis_is_a_row_and_a_field():
    assert {axis.name for axis in ROWS} == FIELDS
    assert {axis.part_of for axis in ROWS if axis.part_of} <= set(AXES)
    assert {"pp"} == set(AXES) - set(LAYOUT_AXES)


@pytest.mark.parametrize("axis", ROWS, ids=lambda axis: axis.name)
def test_a_row_names_sizes_and_settings_that_there_are(axis):
    assert set(axis.divides) <= sizes_of(MODEL).keys()
    assert {key for key, _ in axis.set_by.values()} <= {field.name for field in dataclasses.fields(Strategy)}


@pytest.mark.parametrize("name", [axis.name for axis in ROWS if axis.divides])
def test_a_degree_that_divides_no_size_is_refused_for_each_size(name):
    strategy = Strategy(mesh=Mesh(**{name: 7}))
    problems = " ".join(model_problems(strategy, MODEL))
    for size, value in sizes_of(MODEL).items():
        assert (f"mesh.{name} = 7 does not divide {size} = " in problems) == (
            size in BY_NAME[name].divides and value % 7 > 0
        )


@pytest.mark.parametrize("name", [name for axis in ROWS for name in axis.set_by])
def test_a_name_stands_for_its_axis_only_where_the_setting_says_so(name):
    axis = next(axis for axis in ROWS if name in axis.set_by)
    key, value = axis.set_by[name]
    rules = {"operators": {"a.matmul": [[name, None]]}}
    other = {True: False, "gather": "ulysses", "ulysses": "gather"}[value]
    for setting, dims in ((value, (axis.name,)), (other, ())):
        strategy = strategy_of({"mesh": {axis.name: 2}, key: setting, "rules": rules})
        assert strategy.rules.operators[0].inputs == ((dims, ()),)


def test_what_an_axis_refuses_is_said_where_it_is_used():
    assert Strategy(mesh=Mesh(dp=2, tp=2)).axis_problems("sampling") == []
    (problem,) = Strategy(mesh=Mesh(cp=2, tp=2), source="s.yaml", lines={"mesh.cp": 3}).axis_problems("sampling")
    assert problem == "s.yaml:3: mesh.cp: texts are sampled a token at a time; leave cp out"
