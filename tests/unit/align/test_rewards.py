# SPDX-License-Identifier: Apache-2.0
"""Functions that reward: what they are given, and what is said when they fail; divergence kept near a target."""

import pytest

from sporeloom.align.advantages import AdaptiveKL, gae, group_advantages, whitened
from sporeloom.align.rewards import load_reward, rewards_of
from sporeloom.core.errors import ConfigError
from sporeloom.evaluation.reward import program_reward

CODE = """
def by_column(completions, wanted):
    return [float(word in text) for text, word in zip(completions, wanted)]

def by_all(prompts, **columns):
    return [len(prompt) + len(columns) for prompt in prompts]

def short(completions):
    return [1.0]

def fails(completions):
    return completions[0] / 2
"""


@pytest.fixture
def reward(write):
    path = write("rewards.py", CODE)
    return lambda name: (f"{path}:{name}", load_reward(f"{path}:{name}"))


def asked(name, function):
    lines = [{"prompt": "a", "wanted": "x"}, {"prompt": "bb", "wanted": "y"}]
    return rewards_of(name, function, ["a", "bb"], ["x!", "x?"], lines)


def test_a_function_gets_the_columns_it_names_or_all(reward):
    assert asked(*reward("by_column")) == [1.0, 0.0]
    assert asked(*reward("by_all")) == [3.0, 4.0]  # completions and wanted


@pytest.mark.parametrize("column", ["completions", "prompts", "completion_ids"])
@pytest.mark.parametrize("name", ["by_column", "by_all"])
def test_no_column_takes_the_place_of_what_was_sampled(reward, name, column):
    lines = [{"prompt": "a", "wanted": "x"}, {"prompt": "b", "wanted": "y", column: "a reference"}]
    path, function = reward(name)
    with pytest.raises(ConfigError, match=rf"--reward .*: column '{column}' has the name of .*reference_{column}"):
        rewards_of(path, function, ["a", "b"], ["x!", "x?"], lines)


def test_a_column_with_another_name_near_those_is_one(reward):
    lines = [
        {"prompt": "a", "wanted": "x", "completion": "y"},
        {"prompt": "b", "wanted": "y", "reference_completions": 1},
    ]
    assert rewards_of(*reward("by_column"), ["a", "bb"], ["x!", "x?"], lines) == [1.0, 0.0]
    assert rewards_of(*reward("by_all"), ["a", "bb"], ["x!", "x?"], lines) == [5.0, 6.0]


@pytest.mark.parametrize(
    ("name", "told"), [("short", "returned 1 numbers for 2 texts"), ("fails", "TypeError: unsupported operand")]
)
def test_a_function_that_fails_is_named(reward, name, told):
    with pytest.raises(ConfigError, match=rf"--reward .*rewards\.py:{name}: {told}"):
        asked(*reward(name))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing.py:f", "give FILE.py:FUNCTION, where FILE.py exists"),
        ("plain", "give FILE.py:FUNCTION"),
    ],
)
def test_a_name_that_is_none_is_told(name, told):
    with pytest.raises(ConfigError, match=told):
        load_reward(name)


def test_a_file_without_the_function_or_that_fails_is_told(write):
    with pytest.raises(ConfigError, match=r"empty\.py has no function f"):
        load_reward(f"{write('empty.py', '')}:f")
    with pytest.raises(ConfigError, match=r"broken\.py fails: ZeroDivisionError"):
        load_reward(f"{write('broken.py', '1 / 0')}:f")


def test_a_coefficient_follows_the_divergence():
    adaptive = AdaptiveKL(0.1, target=6.0, horizon=100)
    adaptive.follow(12.0, 10)  # twice the target: clipped to 0.2
    assert adaptive.coefficient == pytest.approx(0.1 * 1.02)
    adaptive.follow(5.4, 10)
    assert adaptive.coefficient == pytest.approx(0.1 * 1.02 * 0.99)


def test_gaps_in_a_mask_do_not_end_a_text():
    advantages, returns = gae([[0.0, 0.0, 1.0, 0.0]], [[0.5, 9.0, 0.25, 9.0]], [[1, 0, 1, 0]], 1.0, 1.0)
    assert advantages.tolist() == [[0.5, 0, 0.75, 0]] and returns.tolist() == [[1.0, 0, 1.0, 0]]


def test_equal_rewards_are_no_advantage():
    assert group_advantages([1.0, 1.0, 0.0, 1.0], 2).tolist()[:2] == [0.0, 0.0]
    assert abs(whitened([[1.0, 2.0, 7.0]], [[1, 1, 0]]).sum()) < 1e-12


def test_programs_that_pass_are_rewarded():
    reward = program_reward("humaneval-x:python")
    lines = [{"declaration": "def two():\n", "test": f"assert two() == {wanted}"} for wanted in (2, 2, 3)]
    completions = ["    return 2\n", "    return 3\n", "    return 3\n\nprint('x')"]
    assert rewards_of("humaneval-x:python", reward, ["def two():\n"] * 3, completions, lines) == [1.0, 0.0, 1.0]
    answers = [
        f"Here it is:\n\n```python\ndef two():\n    return {value}\n```\nIt returns {value}." for value in (2, 3, 3)
    ]
    assert rewards_of("humaneval-x:python", reward, ["Write two()."] * 3, answers, lines) == [1.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match="the lines have no declaration, test: they must be problems of HumanEval-X"):
        rewards_of("humaneval-x:python", reward, ["x"], ["y"], [{}])
    with pytest.raises(ConfigError, match="no such language; known: python"):
        program_reward("humaneval-x:pyton")
