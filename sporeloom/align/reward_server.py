# SPDX-License-Identifier: Apache-2.0
"""Rewards from a server: prompts, completions and columns go there as JSON, rewards come back."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text

SCHEMES = ("http", "https")
TIMEOUT_S = 600.0
MAX_BYTES = 1 << 26


def is_url(name: str) -> bool:
    """Whether a reward is an address, not a function of a file."""
    return name.partition("://")[0] in SCHEMES and "://" in name


def address_problem(url: str) -> str | None:
    """Describe why no request can go to an address."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"--reward {url}: {error}; give http://HOST:PORT/PATH"
    if not host:
        return f"--reward {url}: an address without a host; give http://HOST:PORT/PATH"
    if any(not "!" <= letter <= "~" for letter in url):
        return f"--reward {url!r}: has spaces or other characters than ASCII; write them as %XX, as in %20 for a space"
    return None


def server_reward(url: str) -> Callable[..., Sequence[float]]:
    """A reward function that asks a server by POST: `{"prompts": [...], "completions": [...], COLUMN: [...], ...}`, answered
    by `{"rewards": [...]}`.

    Raises:
        ConfigError: no request can go there.
    """
    if problem := address_problem(url):
        raise ConfigError(problem)

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> Sequence[float]:
        content = json_text({"prompts": prompts, "completions": completions, **columns}, ensure_ascii=False).encode()
        request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                told = answer.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise ValueError(f"the server answered {error.code} {error.reason}") from None
        except OSError as error:
            raise ValueError(f"the server cannot be reached: {getattr(error, 'reason', error)}") from None
        if len(told) > MAX_BYTES:
            raise ValueError(f"the server answered with more than {MAX_BYTES:,} bytes")
        return _rewards(told)

    return reward


def _rewards(content: bytes) -> Sequence[float]:
    """Raises:
    ValueError: it is not an answer.
    """
    try:
        values = json.loads(content)["rewards"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError('the server did not answer {"rewards": [...]}') from None
    if not isinstance(values, list) or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        raise ValueError("the server's rewards are not a list of numbers")
    return values
