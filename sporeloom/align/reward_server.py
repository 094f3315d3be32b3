# SPDX-License-Identifier: Apache-2.0
"""Rewards from a server: prompts, completions and columns go there as JSON, rewards come back."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sporeloom.align.http_post import TooLongAnswerError, post
from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text
from sporeloom.core.log import milestone

SCHEMES = ("http", "https")
MAX_BYTES = 1 << 26
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers of servers that are overloaded or restart, after which a request is repeated."""
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the requests to a reward server."""

    timeout_s: float = 600.0
    """Seconds that an answer may take."""
    retries: int = 3
    """Number of times that a failed request is repeated."""
    first_wait_s: float = 1.0
    """Seconds before the first repetition; each further one waits twice as long, up to a minute."""

    def wait_s(self, attempt: int, asked: str | None) -> float:
        """Seconds to wait after a failed attempt, counted from 0; `asked`: the server's own Retry-After."""
        own = float(asked) if asked and asked.isdecimal() else self.first_wait_s * 2.0**attempt
        return min(own, LONGEST_WAIT_S)


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


def server_reward(url: str, limits: ServerLimits | None = None) -> Callable[..., Sequence[float]]:
    """A reward function that asks a server by POST: `{"prompts": [...], "completions": [...], COLUMN: [...], ...}`, answered
    by `{"rewards": [...]}`. Requests that a server may answer later are repeated.

    Raises:
        ConfigError: no request can go there.
    """
    if problem := address_problem(url):
        raise ConfigError(problem)

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> Sequence[float]:
        content = json_text({"prompts": prompts, "completions": completions, **columns}, ensure_ascii=False).encode()
        return _rewards(_answer(url, content, limits or ServerLimits()))

    return reward


def _answer(url: str, content: bytes, limits: ServerLimits) -> bytes:
    """The server's answer to a request, which is repeated where that may help.

    Raises:
        ValueError: there is none.
    """
    for attempt in range(limits.retries + 1):
        asked, may_pass = None, True
        try:
            return post(url, content, limits.timeout_s, MAX_BYTES)
        except TooLongAnswerError as error:
            raise ValueError(f"the server {error}") from None
        except urllib.error.HTTPError as error:
            problem, may_pass = f"the server answered {error.code} {error.reason}", error.code in PASSING
            asked = error.headers.get("Retry-After")
        except TimeoutError:
            problem = f"the server did not answer within {limits.timeout_s:g} s (--reward-timeout-s)"
        except (OSError, http.client.HTTPException) as error:
            problem = f"the server cannot be reached: {getattr(error, 'reason', None) or error}"
        if not may_pass:
            raise ValueError(problem)
        if attempt < limits.retries:
            wait_s = limits.wait_s(attempt, asked)
            milestone(f"{url}: {problem}; asking again in {wait_s:g} s, {limits.retries - attempt} times at most")
            time.sleep(wait_s)
    times = f"after {limits.retries + 1} requests (--reward-retries): " if limits.retries else ""
    raise ValueError(f"{times}{problem}")


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
