# SPDX-License-Identifier: Apache-2.0
"""Find the functions that a text in one of HumanEval-X's languages defines, with their parameters and results."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFINITIONS = {
    "python": re.compile(r"^[ \t]*def (\w+)\(", re.MULTILINE),
    "go": re.compile(r"^func (\w+)\(", re.MULTILINE),
    "js": re.compile(
        r"^[ \t]*(?:(?:const|let|var) (\w+)\s*=\s*(?:function\b|\(|\w+\s*=>)|function (\w+)\()", re.MULTILINE
    ),
    "rust": re.compile(r"^[ \t]*(?:pub )?fn (\w+)", re.MULTILINE),
    "cpp": re.compile(
        r"\b(?!(?:if|for|while|switch|catch)\b)(\w+)[ \t]*\([^(){};]*(?:\([^(){};]*\)[^(){};]*)*\)\s*"
        r"(?:const\s*|throws [\w., ]+)?\{"
    ),
}
DEFINITIONS["java"] = DEFINITIONS["cpp"]
"""Position of a function's definition, and its name."""
OPENING, CLOSING = "([{<", ")]}>"
_PARAMETER_END = re.compile(r"(?<!:):(?!:)|=")
_BODY = re.compile(r"(?:\{\}|[^{])*?\{(?!\})")
_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|' r"'(?:\\.|[^'\\])'|//[^\n]*|[(){}]")


@dataclass(frozen=True)
class Signature:
    """The head of a function's definition in a text."""

    name: str
    parameters: tuple[str, ...]
    """Parameters as they are written, with their types."""
    before: str
    """The text before the line of the definition."""
    head: str
    """Text from the start of its line to the start of its body, including the brace."""
    end: int
    """Position where its body begins in the text."""

    def names(self, language: str) -> list[str]:
        """The parameters' names in C++, Java, Go and Rust."""
        place = 0 if language == "go" else -1
        return [re.findall(r"\w+", _PARAMETER_END.split(parameter)[0])[place] for parameter in self.parameters]


def defined(text: str, language: str) -> list[str]:
    """Names of the functions that a text defines, in order."""
    return [next(filter(None, found.groups())) for found in DEFINITIONS[language].finditer(text)]


def before_definition(text: str, language: str, name: str) -> str:
    """The part of a text before the line of the last definition of `name`."""
    found = [m for m in DEFINITIONS[language].finditer(text) if name in m.groups()][-1]
    return text[: text.rfind("\n", 0, found.start(found.lastindex or 0)) + 1]


def signature(text: str, language: str, name: str) -> Signature:
    """The head of the last definition of `name` in a text of C++, Java, Go or Rust."""
    found = [m for m in DEFINITIONS[language].finditer(text) if name in m.groups()][-1]
    before = before_definition(text, language, name)
    opening = text.index("(", found.end(1))
    closing = matching(text, opening)
    body = _BODY.match(text, closing + 1)
    end = body.end() if body else len(text)
    return Signature(name, split(text[opening + 1 : closing]), before, text[len(before) : end], end)


def split(parameters: str) -> tuple[str, ...]:
    """Split a list of parameters at its commas, but not at those inside brackets."""
    parts, depth, last = [], 0, ""
    for letter in parameters:
        depth += (letter in OPENING) - (letter in CLOSING and not (letter == ">" and last in "-="))
        last = letter
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1:] = [parts[-1] + letter] if parts else [letter]
    return tuple(part.strip() for part in parts if part.strip())


def matching(text: str, opening: int) -> int:
    """Position of the bracket that closes the one at `opening`; quoted ones do not count."""
    pair = {"(": ")", "{": "}"}[text[opening]]
    depth = 0
    for token in _BRACKETS.finditer(text, opening):
        if token.group() == text[opening]:
            depth += 1
        elif token.group() == pair:
            depth -= 1
            if depth == 0:
                return token.start()
    return len(text)
