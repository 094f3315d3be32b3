# SPDX-License-Identifier: Apache-2.0
import time

import pytest

from sporeloom.core.log import counted, progress


@pytest.mark.parametrize(("number", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (12345, "12,345 files")])
def test_one_is_no_plural(number, text):
    assert counted(number, "file", "files") == text


def test_what_takes_long_shows_that_it_goes_on_and_what_does_not_is_silent(capfd, monkeypatch):
    monkeypatch.delenv("RANK_ID", raising=False)
    assert list(progress(range(3), "quick")) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    for number in progress(range(24), "slow"):
        time.sleep(0.1)
        assert number < 24
    assert "[sporeloom] slow" in capfd.readouterr().err
    monkeypatch.setenv("RANK_ID", "1")
    assert list(progress(range(3), "another rank")) == [0, 1, 2]
    assert capfd.readouterr().err == ""
