# SPDX-License-Identifier: Apache-2.0
"""Milestones of a run, said once by one rank on stderr; numbers go to metrics files."""

from __future__ import annotations

import sys

MARK = "[mindloom] "


def milestone(text: str) -> None:
    print(MARK + text, file=sys.stderr, flush=True)
