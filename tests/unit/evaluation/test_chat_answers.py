# SPDX-License-Identifier: Apache-2.0
"""Programs in answers of models that talk."""

from types import SimpleNamespace

import pytest
from conftest import SHARED

from codegeex.tokenizer import CodeGeeXTokenizer
from sporeloom.core.errors import ConfigError
from sporeloom.data.special_tokens import SpecialTokens, content, template
from sporeloom.evaluation import rpc
from sporeloom.evaluation.chat import answer_program, defined, question, translation_question
from sporeloom.evaluation.config import read_problems
from sporeloom.evaluation.programs import NAMES
from sporeloom.evaluation.prompter import Prompter, prompter_of

HELPED = {
    "prompt": 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef quarter(x):\n    """A quarter."""\n',
    "declaration": "import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef quarter(x):\n",
    "canonical_solution": "    return half(half(x))\n",
    "test": "assert quarter(8) == 2",
}


def passes(text, problem=HELPED):
    source = answer_program(problem, "python", text).solution.partition("\n# SPDX")[0]
    try:
        exec(f"{source}\n{problem['test']}", {})  # of this file's own
    except (AssertionError, NameError, IndentationError):
        return False
    return True


@pytest.mark.parametrize(
    "text",
    [
        "Sure!\n\n```python\ndef quarter(x):\n    return half(half(x))\n```\nThis halves twice.",
        "```\ndef half(x):\n    return x * 0.5\n\ndef quarter(x):\n    return half(half(x))\n```",
        "```python\nfrom math import floor\n\ndef other(x):\n    return x // 4\n\ndef quarter(x):\n    return other(x)\n```",
        "To test it:\n```python\nprint(1)\n```\nand\n```python\ndef quarter(x):\n    return math.floor(x / 4)\n```",
        "def quarter(x):\n    return x / 4",
        "```python\n    return half(half(x))\n```",
        "```python\ndef quarter(x):\n    return x / 4\n",  # cut off behind the function
    ],
)
def test_a_function_is_found_in_an_answer(text):
    assert passes(text)


@pytest.mark.parametrize(
    "text",
    ["", "I cannot.", "```python\ndef quarter(x):\n    return half(x)\n```", "```python\nreturn half(half(x))\n```"],
)
def test_an_answer_without_it_fails(text):
    assert not passes(text)


@pytest.mark.parametrize("language", NAMES)
def test_every_published_solution_is_whole_in_an_answer(language):
    """What stands in the program: the function once, its helpers once, no second way in."""
    if not (SHARED / "data" / "humaneval-x").is_dir():
        pytest.skip("no ../shared/data/humaneval-x")
    for problem in read_problems(SHARED / "data" / "humaneval-x", language).values():
        *helpers, entry = defined(problem["declaration"], language)
        whole = problem["declaration"] + problem["canonical_solution"]
        own_main = {"cpp": "int main() { return 0; }\n", "go": "func main() {}\n", "rust": "fn main() { panic!() }\n"}
        answer = f"Here:\n```{language}\n{whole}\n{own_main.get(language, '')}```\nDone."
        solution = answer_program(problem, language, answer).solution.replace(rpc.source(language), "")
        found = defined(solution, language)
        assert [found.count(name) for name in (*helpers, entry)] == [1] * (1 + len(helpers)), problem["task_id"]
        assert found.count("main") == (language in ("cpp", "java", "rust"))  # of the calls


def test_a_java_method_alone_is_put_into_its_class():
    problem = {
        "declaration": "import java.util.*;\n\nclass Solution {\n    public int f(int x) {\n",
        "test": "public class Main { public static void main(String[] a) { } }",
    }
    for block in ("public int f(int x) {\n  return 1;\n}", "class Solution {\n public int f(int x) { return 1; }\n}"):
        source = answer_program(problem, "java", f"```java\n{block}\n```").solution
        assert source.count("class Solution {") == 1 and source.startswith("import java.util.*;")
        assert source.count("{") == source.count("}")


def test_go_takes_in_what_is_used():
    problem = {
        "declaration": "\nfunc F(x float64) float64 {\n",
        "import": "",
        "test_setup": "package main\n",
        "test": "func TestF(t *testing.T) {}",
    }
    block = (
        'package main\n\nimport (\n    "fmt"\n    "math"\n)\n\nfunc F(x float64) float64 {\n    return math.Abs(x)\n}\n'
    )
    source = answer_program(problem, "go", f"```go\n{block}\nfunc main() {{ fmt.Println(F(1)) }}\n```").solution
    assert source.count("package main") == 1 and source.count("import (") == 1
    assert '    "math"\n' in source and '    "fmt"\n' not in source and "func main" not in source


def test_questions_have_the_problem_and_ask_for_a_block():
    assert question(HELPED, "python").endswith('def quarter(x):\n    """A quarter."""\n```')
    asked = translation_question(HELPED, "python", {"declaration": "int quarter(int x){"}, "cpp")
    assert "to C++." in asked and "return half(half(x))" in asked and asked.endswith("```cpp\nint quarter(int x){\n```")


class Plain(SpecialTokens):
    def encode_text(self, text):
        return [ord(letter) for letter in text]


class Talks(Plain):
    benchmark_form = "chat"

    def chat(self, messages, add_generation_prompt):
        return [span for m in messages for span in (template(f"{m.role}: "), content(m.content), template("|"))]


def job(family, tokenizer):
    return SimpleNamespace(family=family, tokenizer=tokenizer)


def test_a_model_is_asked_as_it_was_taught():
    plain = Plain()
    assert prompter_of(job("codegeex", plain), None, None).form == "tagged"
    assert prompter_of(job("palm", plain), None, None).form == "plain"
    prompter = prompter_of(job("codegeex", Talks()), None, "Be brief.")
    assert prompter.form == "chat" and prompter.ending("python") is None
    prompt = prompter.prompt(HELPED, "python")
    assert prompt.text == f"system: Be brief.|user: {question(HELPED, 'python')}|"
    assert prompt.tokens == tuple(map(ord, prompt.text))
    tagged = prompter_of(job("codegeex", Talks()), "tagged", None).prompt(HELPED, "python")
    assert tagged.text.startswith("# language: Python\n")
    assert Prompter("plain", "palm", plain).prompt(HELPED, "python").text == HELPED["prompt"].strip()


@pytest.mark.parametrize(
    ("family", "form", "system", "message"),
    [
        ("palm", "tagged", None, "have no tags for programming languages"),
        ("palm", "chat", None, "was trained on plain text only"),
        ("codegeex", "plain", "x", "--system-prompt is for --prompt-form chat, not plain"),
    ],
)
def test_a_form_that_the_model_does_not_know_is_refused(family, form, system, message):
    with pytest.raises(ConfigError, match=message):
        prompter_of(job(family, CodeGeeXTokenizer.__new__(CodeGeeXTokenizer)), form, system)
