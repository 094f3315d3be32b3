# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the flags of `sporeloom bisect`, which loads nothing for them."""

import pytest

from sporeloom.cli import bisect
from sporeloom.core.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("a", "b"), "a: has no recording; train with --record 2"),
        (("a", "b", "--tolerance", "-1"), "--tolerance must be in [0, 1], got -1.0"),
        (("a", "b", "--step", "-1"), "--step must be at least 0, got -1"),
    ],
)
def test_a_mistake_is_reported(tmp_path, monkeypatch, words, reported):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        bisect.main(words)
    assert reported in str(caught.value)
