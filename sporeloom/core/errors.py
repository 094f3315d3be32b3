# SPDX-License-Identifier: Apache-2.0
"""ConfigError, the one exception for a user's mistake, and how a command line prints it."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO, TypeVar

Result = TypeVar("Result")

EXIT_BAD_INPUT = 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Errors of a write that are not bugs of this package, and which may not name their file."""
MAX_SHOWN = 50
"""Maximum number of problems that a call prints."""
MAX_WORD = 100
"""Number of characters of a word that are compared with known words."""
_LINKS_IN_A_CIRCLE = "Symlink loop from "
_LONGEST, _END = 1200, 400
"""Maximum number of characters shown of a problem, and how many of them are from its end."""
_CONTROL = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that control a terminal, change the direction of writing or cannot be seen, and those that UTF-8
cannot encode."""


def printable(text: str) -> str:
    """A text for a message: control characters are escaped, so that what a file says can neither steer a terminal nor
    look like a line of this program. Of a long one the middle is left out."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - _END]} ... ({len(text):,} characters) ... {text[-_END:]}"
    return without_control(text)


def without_control(text: str) -> str:
    """A line of a report in which control characters are escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


class ConfigError(Exception):
    """An input of the user cannot be used. Carries every problem found, one printable line each."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [printable(problem) for problem in ([problems] if isinstance(problems, str) else problems)]
        assert self.problems, "a ConfigError needs at least one problem"
        super().__init__("\n".join(self.problems))


class Problems(list[str]):
    """Collects the problems of a call, so that all of them are reported at once."""

    def of(self, work: Callable[..., Result], *arguments: Any) -> Result | None:
        """Return the result of `work`, or None if a ConfigError prevented it; its problems are collected."""
        try:
            return work(*arguments)
        except ConfigError as error:
            self.extend(error.problems)
            return None

    def raise_if_any(self) -> None:
        """Raises:
        ConfigError: there are any; each is reported once.
        """
        if self:
            raise ConfigError(dict.fromkeys(self))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or an empty string."""
    if len(word) > MAX_WORD:
        return ""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""


def silence(stream: TextIO) -> None:
    """Redirect further output to `stream`, whose reader is gone, to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def run_tool(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> None:
    """Run a command line: a ConfigError becomes its message and exit code 2, Ctrl-C exit code 130.

    `argv`: the words after the tool's name; those this process was started with without it.
    """
    try:
        code = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except ConfigError as error:
        for problem in error.problems[:MAX_SHOWN]:
            print(f"error: {problem}", file=sys.stderr)
        if len(error.problems) > MAX_SHOWN:
            print(f"error: and {len(error.problems) - MAX_SHOWN:,} more problems", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except BrokenPipeError:  # the reader of our output (head, less) left; Python would complain at exit
        silence(sys.stdout)
        silence(sys.stderr)
        code = 0
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        where = "" if error.filename is None else f"{str(error.filename)[:200]}: "
        print(f"error: {printable(f'{where}{error.strerror or error}')}", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except RuntimeError as error:  # of Path.resolve, before Python 3.13
        if not str(error).startswith(_LINKS_IN_A_CIRCLE):
            raise
        print(f"error: {printable(str(error).removeprefix(_LINKS_IN_A_CIRCLE))}: links in a circle", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
