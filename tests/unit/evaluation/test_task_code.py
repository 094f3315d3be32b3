# SPDX-License-Identifier: Apache-2.0
"""Task files of the harness that run code are found before they do; those that do not are let through."""

import pytest
from conftest import in_process

from sporeloom.evaluation.task_code import OWN_TASKS, code_problems

PLAIN = """task: town
dataset_path: json
dataset_kwargs: {data_files: a.jsonl}
output_type: multiple_choice
doc_to_text: '{{q}}'
"""
RUNS = {
    "a function": ("doc_to_text: !function utils.f\n", 6, "the tag !function runs Python code"),
    "a function in flow style": ("metric_list: [{metric: !function u.f}]\n", 6, "!function"),
    "a function with a quoted name": ("process_docs: !function 'utils.f'\n", 6, "!function"),
    "a function by the long form of its tag": ("process_docs: !<!function> utils.f\n", 6, "!function"),
    "a function by a tag handle": ("process_docs: !fun%63tion utils.f\n", 6, "!function"),
    "a class": ("class: !function task.Mine\n", 6, "!function"),
    "a metric with code of its own": ("metric_list:\n- {metric: me/mine, hf_evaluate: true}\n", 7, "hf_evaluate"),
    "a metric by an alias": ("x: &a true\nmetric_list:\n- metric: me/mine\n  hf_evaluate: *a\n", 9, "hf_evaluate"),
    "unsafe code": ("unsafe_code: true\n", 6, "unsafe_code"),
    "a data set with code": ("dataset_kwargs: {trust_remote_code: True}\n", 6, "trust_remote_code"),
    "a data set that is a script": ("dataset_path: ./data.py\n", 6, "dataset_path"),
    "Python's own tags": ("x: !!python/name:os.system\n", 6, "python/name"),
}


@pytest.mark.parametrize(("more", "line", "words"), RUNS.values(), ids=RUNS)
def test_what_runs_code_is_found_with_its_line(write, more, line, words):
    path = write("mine.yaml", PLAIN + more)
    (problem, *_) = code_problems([path])
    assert problem.startswith(f"{path}:{line}: ")
    assert words in problem
    assert problem.endswith("; --trust-remote-code allows it")


@pytest.mark.parametrize(
    "include", ["include: base.yaml\n", "include: [other.yaml, base.yaml]\n", "include:\n- base.yaml\n"]
)
def test_an_included_file_is_looked_at_too(write, include):
    write("base.yaml", "include: deeper/utils.yaml\n")
    write("other.yaml", "task: x\ninclude: mine.yaml\n")
    deeper = write("deeper/utils.yaml", "doc_to_text: !function utils.f\n")
    path = write("mine.yaml", PLAIN + include)
    assert [problem.partition(": ")[0] for problem in code_problems([path])] == [f"{deeper}:1"]


@pytest.mark.parametrize(
    "more",
    [
        "",
        "unsafe_code: false\n",
        "x: '!function'\n",
        "# !function\n",
        "description: |\n  !function\n",
        "hf_evaluate: no\n",
    ],
)
def test_what_runs_no_code_is_let_through(write, more):
    assert code_problems([write("mine.yaml", PLAIN + more)]) == []


def test_what_is_installed_is_trusted():
    assert list(OWN_TASKS.glob("*.yaml"))
    assert code_problems(OWN_TASKS.glob("*.yaml")) == []


def test_the_command_refuses_it_and_runs_nothing(write, tmp_path):
    pytest.importorskip("lm_eval")
    mark = tmp_path / "ran"
    write("tasks/utils.py", f"open({str(mark)!r}, 'w')\ndef f(doc): return ''\n")
    path = write("tasks/mine.yaml", PLAIN + "doc_to_target: !function utils.f\n")
    for asked in (("--tasks", path), ("--tasks", "town", "--include-path", path.parent)):
        outcome = in_process("tools/evaluate.py", "lm-eval", "--checkpoint", tmp_path / "none", *asked)
        assert outcome.code == 2
        assert f"{path}:6: the tag !function runs Python code; --trust-remote-code allows it" in outcome.output
        assert not mark.exists()
    trusting = in_process(
        "tools/evaluate.py", "lm-eval", "--checkpoint", tmp_path / "none", "--tasks", path, "--trust-remote-code"
    )
    assert "!function" not in trusting.output


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ '{0.__class__.__init__}'.format(q) }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_reaches_nothing_but_its_row(template, monkeypatch):
    pytest.importorskip("lm_eval")
    import lm_eval.utils  # noqa: PLC0415
    from jinja2 import TemplateError  # noqa: PLC0415

    from sporeloom.evaluation import harness  # noqa: PLC0415

    monkeypatch.setattr(lm_eval.utils, "env", lm_eval.utils.env)
    harness._confine_templates()
    assert lm_eval.utils.apply_template("{{q}} {{q | regex_replace('a', 'b')}}", {"q": "a"}) == "a b"
    with pytest.raises(TemplateError):
        lm_eval.utils.apply_template(template, {"q": "a"})
