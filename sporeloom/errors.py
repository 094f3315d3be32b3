# SPDX-License-Identifier: Apache-2.0
"""The one error a user's mistake raises, and how a command line shows it."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO, TypeVar

Result = TypeVar("Result")

EXIT_BAD_INPUT = 2


class ConfigError(Exception):
    """What the user gave cannot be used. Carries every problem found, one line each."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a ConfigError needs at least one problem"
        super().__init__("\n".join(self.problems))


class Problems(list[str]):
    """Collects what is wrong with a call, so that all of it is told at once."""

    def of(self, work: Callable[..., Result], *arguments: Any) -> Result | None:
        """What `work` returns; None if the user's mistakes kept it from that."""
        try:
            return work(*arguments)
        except ConfigError as error:
            self.extend(error.problems)
            return None

    def tell(self) -> None:
        """Raises:
        ConfigError: there are any; each is told once.
        """
        if self:
            raise ConfigError(dict.fromkeys(self))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""


def silence(stream: TextIO) -> None:
    """Let what is still written to `stream`, whose reader is gone, go nowhere."""
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
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except BrokenPipeError:  # the reader of our output (head, less) left; Python would complain at exit
        silence(sys.stdout)
        silence(sys.stderr)
        code = 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {str(error.filename)[:200]}: {error.strerror}", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
