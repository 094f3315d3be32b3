# SPDX-License-Identifier: Apache-2.0
"""HumanEval-X as published: prompts, and the extraction of a program from a generated text.

Source: THUDM/CodeGeeX, codegeex/benchmark/utils.py and humaneval-x/evaluate_humaneval_x.py. Rust has no published rules;
its prompt is the description and the declaration, the rest follows C++.
"""

from __future__ import annotations

from sporeloom.evaluation.checks import Problem, Program, check

NAMES = {"python": "Python", "cpp": "C++", "java": "Java", "js": "JavaScript", "go": "Go", "rust": "Rust"}
"""Each language's name in the data's files and in a translation prompt."""

_PYTHON_ENDS = ("\ndef", "\nclass", "\nif", "\n#", "\nprint", "\nassert")


def generation_prompt(problem: Problem, language: str) -> str:
    """The text that the model continues, without the line that names its language."""
    prompt: str = problem["prompt"]
    return prompt + problem["declaration"].lstrip("\n") if language == "rust" else prompt


def translation_prompt(source: Problem, source_language: str, target: Problem, target_language: str) -> str:
    """The full solution in one language and the declaration in the other."""
    solution = f"{source['declaration']}\n{source['canonical_solution'].rstrip()}"
    head = f"code translation\n{NAMES[source_language]}:\n{solution}\n{NAMES[target_language]}:\n"
    return head + str(target["declaration"])


def extract(text: str, language: str) -> str:
    """Extract the function's body from a generated text, by the published rules."""
    if language == "python":
        for end in _PYTHON_ENDS:
            text = text[: text.rfind(end)] if end in text else text
        return text
    if language == "java" and "public static void main" in text:
        text = text[: text.find("public static void main")] + "}"
    if language == "go":
        for end in ("\n//", "\nfunc main("):
            text = text[: text.rfind(end)] if end in text else text
    if "}" in text:
        text = text[: text.rfind("}") + 1]
    if language == "java" and text.count("{") + 1 == text.count("}"):
        text += "\n}"
    return text


def program(problem: Problem, language: str, solution: str, is_translation: bool = False) -> Program:
    """The check of a `solution` which continues the problem's prompt, or its declaration."""
    head: str = problem["declaration"] if is_translation or language == "rust" else problem["prompt"]
    if language == "python":  # which ends where a line is not indented
        lines = solution.split("\n")
        ended = next((i for i, line in enumerate(lines) if line.strip() and line[0] not in " \t"), len(lines))
        solution = "\n".join(lines[:ended])
    return check(problem, language, head, solution)
