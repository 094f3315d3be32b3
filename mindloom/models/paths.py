# SPDX-License-Identifier: Apache-2.0
"""Names within a network."""

import re


def path_matches(pattern: str, path: str) -> bool:
    """Whether `pattern`, with * for one component, is the end of `path`."""
    return re.search(r"(^|\.)" + re.escape(pattern).replace(r"\*", r"[^.]+") + "$", path) is not None
