# SPDX-License-Identifier: Apache-2.0
"""The programming languages CodeGeeX was trained to distinguish, by a first line that names them.

Source: THUDM/CodeGeeX codegeex/data/data_utils.py (tags), codegeex/benchmark/utils.py (where a function ends).
"""

from typing import Literal

TAGS = {
    "c": "// language: C",
    "c#": "// language: C#",
    "c++": "// language: C++",
    "css": "/* language: CSS */",
    "cuda": "// language: Cuda",
    "fortran": "!language: Fortran",
    "go": "// language: Go",
    "html": "<!--language: HTML-->",
    "java": "// language: Java",
    "javascript": "// language: JavaScript",
    "kotlin": "// language: Kotlin",
    "lean": "-- language: Lean",
    "objective-c": "// language: Objective-C",
    "objective-c++": "// language: Objective-C++",
    "pascal": "// language: Pascal",
    "php": "// language: PHP",
    "python": "# language: Python",
    "r": "# language: R",
    "rust": "// language: Rust",
    "scala": "// language: Scala",
    "shell": "# language: Shell",
    "sql": "-- language: SQL",
    "tex": "% language: TeX",
    "typescript": "// language: TypeScript",
}
ALIASES = {"cpp": "c++", "js": "javascript", "py": "python"}

# How a function that the prompt began ends in the text that continues it.
FUNCTION_ENDS: dict[str, Literal["dedent", "closed_brace"]] = {
    "python": "dedent",
    **dict.fromkeys(("c", "c#", "c++", "cuda", "go", "java", "javascript", "rust", "typescript"), "closed_brace"),
}


def tagged(prompt: str, language: str) -> str:
    """The prompt under the line that names its language."""
    return f"{TAGS[language]}\n{prompt}"
