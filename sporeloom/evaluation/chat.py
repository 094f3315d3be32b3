# SPDX-License-Identifier: Apache-2.0
"""HumanEval-X as a question to a chat model: the user message, and the program in the answer."""

from __future__ import annotations

import re

from sporeloom.evaluation.checks import Problem, Program, check
from sporeloom.evaluation.programs import NAMES, extract, generation_prompt, program
from sporeloom.evaluation.signatures import before_definition, defined

BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
TAKEN_IN = re.compile(r"^\s*(?:#include|using |import |from |use |package )")
CLASS = "class Solution {"
ENDS = {
    "cpp": re.compile(r"^[ \t]*int main\s*\(", re.MULTILINE),
    "go": re.compile(r"^func main\(", re.MULTILINE),
    "java": re.compile(r"^(?:public )?class Main\b", re.MULTILINE),
    "rust": re.compile(r"^fn main\(", re.MULTILINE),
}
"""Start of a main program in the answer, which calls the function."""


def question(problem: Problem, language: str) -> str:
    """User message that requests the function."""
    prompt = generation_prompt(problem, language)
    return f"Complete this {NAMES[language]} function. {_ANSWER}\n\n{_fenced(prompt, language)}"


def translation_question(source: Problem, source_language: str, target: Problem, target_language: str) -> str:
    """User message that requests the function in another language."""
    solution = source["declaration"] + source["canonical_solution"]
    return (
        f"Translate this {NAMES[source_language]} function to {NAMES[target_language]}. {_ANSWER}\n\n"
        f"{_fenced(solution, source_language)}\n\nIt begins with:\n\n{_fenced(target['declaration'], target_language)}"
    )


_ANSWER = "Answer with the whole function in one code block."


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


def answer_program(problem: Problem, language: str, text: str) -> Program:
    """The check of the function in an answer.

    The function is that of the first code block which defines it, or of the whole text. What the problem has before it,
    and the block lacks, is put before it: what it takes in, and functions it may call. A block that does not define it is
    what continues the declaration.
    """
    *helpers, entry = defined(problem["declaration"], language)
    blocks = BLOCK.findall(text) or [text]
    block = next((block for block in blocks if entry in defined(block, language)), None)
    if block is None:
        return program(problem, language, extract(blocks[0], language), is_translation=True)
    if end := ENDS[language].search(block) if language in ENDS else None:
        block = block[: end.start()]
    before = before_definition(problem["declaration"], language, entry)
    missing = [name for name in helpers if name not in defined(block, language)]
    if language == "java":
        block = _in_class(block, before.partition(CLASS)[2] if missing else "")
        missing = []
    lines = re.findall(r".+\n?|\n", before)
    kept = lines if missing else [line for line in lines if TAKEN_IN.match(line)]
    if language == "go":
        block = _without_imports(block)
    return check(problem, language, "".join(kept), block)


def _in_class(block: str, helpers: str) -> str:
    """A Java method in its class, with other methods before it."""
    opening = re.search(r"class Solution\s*\{", block)
    if opening is None:
        return f"{CLASS}\n{helpers}\n{block}\n}}\n"
    return f"{block[: opening.end()]}\n{helpers}{block[opening.end() :]}"


def _without_imports(block: str) -> str:
    """Add the imports of Go that are used."""
    block = re.sub(r"^package \w+\n", "", block, flags=re.MULTILINE)
    return re.sub(r'^import (?:\([^)]*\)|"[^"\n]*")\n', "", block, flags=re.MULTILINE)
