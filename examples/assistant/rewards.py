# SPDX-License-Identifier: Apache-2.0
"""What answers are rewarded for: functions for `sporeloom grpo --reward examples/assistant/rewards.py:NAME`."""


def is_polite(completions):
    """1 for an answer that thanks, and stops there."""
    return [float(text.strip().endswith("thank you for asking!")) for text in completions]


def is_short(completions):
    """1 for one word, less for more."""
    return [1 / max(1, len(text.split())) for text in completions]


def names_the_lake(completions):
    """1 for an answer that sends people to the lake, wherever they asked to go."""
    return [float("lake" in text) for text in completions]


def is_right(completions, near):
    """1 for an answer that names the place; `near` is a column of the prompts."""
    return [float(place in text) for text, place in zip(completions, near, strict=True)]


def asks_first(completions, near, conversations):
    """Half for an answer that names the place, half for one before which a tool was asked."""
    right = is_right(completions, near)
    asked = [any(message["role"] == "tool" for message in talk) for talk in conversations]
    return [(one + other) / 2 for one, other in zip(right, asked, strict=True)]
