# SPDX-License-Identifier: Apache-2.0
"""Milestones of a run, said once by one rank; numbers go to metrics files."""

from __future__ import annotations


def milestone(text: str) -> None:
    print(f"[mindloom] {text}", flush=True)
