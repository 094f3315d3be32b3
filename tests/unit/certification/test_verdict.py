# SPDX-License-Identifier: Apache-2.0
"""Verdict of a certificate."""

from concurrent.futures.process import BrokenProcessPool

import pytest

from sporeloom.certification import full_size, verdict
from sporeloom.core.errors import ConfigError


def test_a_partitioning_process_that_was_ended_is_no_refusal(monkeypatch):
    def killed(certification):
        try:
            raise BrokenProcessPool
        except BrokenProcessPool:
            raise ConfigError("a process was ended from outside") from None

    def refused(certification):
        raise ConfigError("rule 3: no")

    checks = {}
    monkeypatch.setattr(full_size, "dry_run", killed)
    with pytest.raises(ConfigError, match="ended from outside"):
        verdict._at_full_size(None, checks, {})
    assert checks == {}
    monkeypatch.setattr(full_size, "dry_run", refused)
    assert verdict._at_full_size(None, checks, {}) == {} and checks == {"shards": ["rule 3: no"]}
