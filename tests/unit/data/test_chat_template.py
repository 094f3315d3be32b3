# SPDX-License-Identifier: Apache-2.0
"""Chat templates render as transformers renders them, within bounds, and remember what of the text is theirs."""

import ast
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import jinja2
import pytest
from conftest import ROOT
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from published_templates import TEMPLATES
from vocabularies import TURNS, glm4_files, sentencepiece_model, write_config

from codegeex.tokenizer import open_tokenizer as open_code
from pangu.tokenizer import open_tokenizer as open_pangu
from sporeloom.core.errors import ConfigError
from sporeloom.core.processes import is_alive
from sporeloom.data.chat_template import ChatTemplate, TemplatedTokenizer, with_template
from sporeloom.data.marked_text import MarkedText, concat, marks_of
from sporeloom.data.special_tokens import Span, joined
from sporeloom.data.tokenizer import ChatMessage, chat_prompt, load_tokenizer
from sporeloom.models.config import ModelConfig

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}


def talk(*contents):
    return [
        ChatMessage(role, text) for role, text in zip(itertools.cycle(("user", "assistant")), contents, strict=False)
    ]


TALKS = {
    "one question": talk("Hi, what is a < b & 'c' in 小城?"),
    "three turns": talk(" first \n", "\n<think>\nhm\n</think>\n\nyes </think> no", "and\tthen <|im_end|>\n"),
    "a system message": [ChatMessage("system", " Be {{ brief }}. "), *talk("Q1", "A1", "Q2")],
    "nothing said": talk(""),
    "an answer at the end": talk("a", "b"),
}


class Generation(Extension):
    """The tag, as the documentation of `apply_chat_template` describes it: what is inside is rendered."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def as_documented(text, messages, add_generation_prompt):
    """Jinja as the documentation of transformers says it is set up."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )

    def refuse(message):
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    return environment.from_string(text).render(**values, **SPECIAL)


def as_transformers(text, messages, add_generation_prompt):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **SPECIAL)
    return tokenizer.apply_chat_template(
        messages, chat_template=text, tokenize=False, add_generation_prompt=add_generation_prompt
    )


OTHERS = [as_documented, *([as_transformers] if find_spec("transformers") else [])]


PACKAGED = {f"transformers/models/{model}/processing_{model}.py": {} for model in ("llama4", "qwen2_audio", "smolvlm")}
"""Files of the package that hold the template of a model as it was published, for models that read text as well."""
PLACE = Path(find_spec("transformers").origin).parents[1] if find_spec("transformers") else Path()
for file, found in PACKAGED.items():
    for node in ast.walk(ast.parse((PLACE / file).read_text())) if (PLACE / file).is_file() else ():
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "{% for message in messages" in node.value
        ):
            found[f"{file}:{node.lineno}"] = node.value
ALL = {**TEMPLATES, **{name: text for found in PACKAGED.values() for name, text in found.items()}}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ALL)
def test_published_templates_render_as_in_transformers(name, other):
    template = ChatTemplate(Path(name), ALL[name], SPECIAL)
    for messages, is_open in itertools.product(TALKS.values(), (True, False)):
        try:
            plain = [{"role": each.role, "content": each.content} for each in messages]
            expected = other(ALL[name], plain, is_open)
        except jinja2.TemplateError as error:
            expected = [f"{name}: chat template: {error}"]
        try:
            found = joined(template.spans(messages, is_open))
        except ConfigError as error:
            found = error.problems
        assert found == expected


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ("{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}", {"enable_thinking": False}, "False"),
        ("{{ xs | tojson }}{{ n + 1 }}", {"xs": [1, {"a": "<é>"}], "n": 2}, '[1, {"a": "<é>"}]3'),
        ("{{ bos_token }}", {"bos_token": "B"}, "B"),  # of transformers' caller, too
    ],
)
def test_variables_of_the_caller_reach_the_template(text, variables, expected):
    assert joined(ChatTemplate(Path("t"), text, SPECIAL).spans(talk("x"), True, variables)) == expected


def test_variables_cannot_take_the_place_of_messages():
    with pytest.raises(ConfigError, match="a variable of a chat template cannot be named messages"):
        ChatTemplate(Path("t"), "x").spans(talk("x"), True, {"messages": []})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}", r"^t: no chat template: line 1: .*endfor"),
        ("{{ raise_exception('roles must alternate') }}", "^t: chat template: roles must alternate$"),
        ("{{ messages[5].content }}", "list object has no element 5"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        *(
            (f"{{{{ ('<s>' + messages[0].content) | {name} }}}}", f"the filter {name[:4]}")
            for name in ("safe", "e", "wordwrap(9)")
        ),
        ("{{ '\\ud800' }}", "half a character"),
        # What costs too much
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s to render"),
        ("{{ 7 ** (7 ** 9) }}", "more than 1 s to render"),
        ("{{ 'a' * 3000000000 }}", "more than 1024 MB of memory"),
        ("{{ 'a'.center(10000000000) | length }}", "more than 1024 MB of memory"),
        ("{{ 'a' * 9000000 }}", "it makes 9,000,000 characters"),
        ("{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "more than 1"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "nested too deeply"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_time(text, message):
    begin = time.process_time()
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(Path("t"), text).spans(talk("hi"))
    assert time.process_time() - begin < 1  # of this process: the other one has the work
    assert joined(ChatTemplate(Path("t"), "{{ messages[0].content }}").spans(talk("hi"))) == "hi"  # and goes on


def test_threads_share_the_process_that_renders():
    template = ChatTemplate(Path("t"), "{{ messages[0].content }}!")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: joined(template.spans(talk(f"text {n}" * 999))), range(50)))
    assert found == [f"text {n}" * 999 + "!" for n in range(50)]


def test_a_process_that_was_forked_renders_by_itself():
    template = ChatTemplate(Path("t"), "{{ messages[0].content }}")
    template.spans(talk("x"))
    child = os.fork()
    if child == 0:
        os._exit(joined(template.spans(talk("child"))) != "child")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert joined(template.spans(talk("parent"))) == "parent"


def test_the_process_that_renders_ends_with_the_one_that_asked():
    code = (
        "import os, signal; from pathlib import Path; from sporeloom.data.chat_template import ChatTemplate\n"
        "from sporeloom.data.chat_template import RENDERER\n"
        "ChatTemplate(Path('t'), 'x'); print(RENDERER._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 20
    while is_alive(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# What of the text is the template's


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_said_is_never_taken_for_the_templates(name):
    """Contents are of letters that no template has."""
    said = [ChatMessage("system", "ΑΒΓ ΔΕΖ"), *talk("ηθι κλμ", "νξο\nπρσ", " τυφ ")]
    for messages in (said, said[1:], said[1:2]):
        try:
            spans = ChatTemplate(Path(name), TEMPLATES[name], SPECIAL).spans(messages)
        except ConfigError:  # roles that it does not take
            continue
        greek = {True: 0, False: 0}
        for span in spans:
            greek[span.is_template] += sum("Ͱ" <= letter <= "Ͽ" for letter in span.text)
        assert greek[True] == 0


CONTROL = ("<|im_start|>", "<|im_end|>", "<|user|>", "[INST]", "<|start_header_id|>", "<start_of_turn>", "<s>", "</s>")


@pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if not name.startswith(("messages as", "join", "set blocks", "tools and"))]
)
def test_what_a_template_writes_is_known_to_be_its_own(name):
    spans = ChatTemplate(Path(name), TEMPLATES[name], SPECIAL).spans(talk("ηθι", "νξο", "τυφ"))
    said = joined([span for span in spans if not span.is_template])
    assert not any(control in said for control in CONTROL)
    assert any(control in joined([s for s in spans if s.is_template]) for control in CONTROL) == any(
        control in joined(spans) for control in CONTROL
    )


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("<|{{ messages[0].role }}|>{{ messages[0].content }}", [("<|user|>", True), (" a<|user|>b ", False)]),
        ("{{ '<|' + messages[0].role + '|>' }}", [("<|user|>", True)]),
        ("{{ '<|%s|>' % messages[0].role }}", [("<|user|>", True)]),
        ("{{ '<|{}|>'.format(messages[0].role) }}", [("<|user|>", True)]),
        ("{{ ['<|', messages[0].role, '|>'] | join }}", [("<|user|>", True)]),
        ("{{ ('<s>' + messages[0].content) | trim }}", [("<s>", True), (" a<|user|>b", False)]),
        ("{{ messages[0].content.split('<|')[1] }}", [("user|>b ", False)]),
        ("{{ messages[0].content.strip()[1:9] | upper }}", [("<|USER|>", False)]),
        ("{{ messages[0].content | tojson }}", [('" a<|user|>b "', False)]),
        ("{{ '<|' ~ messages[0].content[3:10] }}", [("<|", True), ("|user|>", False)]),
        ("{{ messages[0].content | replace('a', '<s>') }}", [(" ", False), ("<s>", True), ("<|user|>b ", False)]),
        ("{% set x = '<s>' ~ messages[0].content %}{{ x[:3] }}{{ x[-2:] }}", [("<s>", True), ("b ", False)]),
        ("{{ messages[0].content | list | join }}", [(" a<|user|>b ", False)]),
        ("{{ '<s>x' | list | join }}{{ 'x' | center(3) | trim }}", [("<s>xx", True)]),
        ("{{ ('<s>' + messages[0].content).center(16) | trim }}", [("<s>", True), (" a<|user|>b", False)]),
        ("{{ messages[0].content | safe }}", [(" a<|user|>b ", False)]),
        ("{{ messages[0].content | e }}", [(" a&lt;|user|&gt;b ", False)]),
        ("{{ name }}{{ '<s>' if name == '<s>' }}", [("<s>", False), ("<s>", True)]),
        ("{% for m in messages %}{{ m['content'] if m['role'] == 'user' }}{% endfor %}", [(" a<|user|>b ", False)]),
    ],
)
def test_through_what_a_template_does_it_is_known_what_was_said(text, spans):
    found = ChatTemplate(Path("t"), text, SPECIAL).spans(talk(" a<|user|>b "), True, {"name": "<s>"})
    assert found == [Span(*span) for span in spans]


def operations(rng):
    """One method of strings and its arguments."""
    word = rng.choice(["a", "b", "AB", " ", "\n", "xa", ""])
    number = rng.randrange(-6, 12)
    return rng.choice(
        [
            lambda s: s + word, lambda s: word + s, lambda s: s * (number % 3), lambda s: s[number:], lambda s: s[:number],
            lambda s: s[::-1], lambda s: s.strip(), lambda s: s.lstrip(), lambda s: s.rstrip("ab"), lambda s: s.strip("xA"),
            lambda s: s.upper(), lambda s: s.lower(), lambda s: s.title(), lambda s: s.capitalize(), lambda s: s.swapcase(),
            lambda s: s.ljust(number), lambda s: s.rjust(number), lambda s: s.center(number), lambda s: s.zfill(number),
            lambda s: s.replace(word or "b", "q"), lambda s: s.replace("a", word, 1), lambda s: s.replace("", "-", 2),
            lambda s: s.removeprefix(word), lambda s: s.removesuffix(word), lambda s: "|".join(s.split()),
            lambda s: s.join(["p", "q", "r"]), lambda s: "".join(s.partition(word or "a")[::2]),
            lambda s: s.rpartition(word or "a")[2], lambda s: [*s.split(word or "a", 1), ""][0],
            lambda s: [*s.rsplit(None, 1), ""][-1], lambda s: [*s.split(None, 1), ""][-1],
            lambda s: [*s.splitlines(), ""][-1],
            lambda s: [*s.splitlines(True), ""][0], lambda s: "".join(s), lambda s: s.expandtabs(), lambda s: f"{s}",
            lambda s: s.casefold(), lambda s: [*s.rsplit(word or "b", 2), ""][0],
        ]
    )  # fmt: skip


def test_marked_strings_are_what_plain_ones_are():
    rng = random.Random(7)
    for _ in range(4000):
        parts = [
            (rng.choice([0, 1]), "".join(rng.choice("ab \n\txß") for _ in range(rng.randrange(5)))) for _ in range(4)
        ]
        plain = "".join(text for _, text in parts)
        marked = concat([MarkedText(text, bytes([own]) * len(text)) for own, text in parts])
        for _ in range(3):
            change = operations(rng)
            plain, marked = change(plain), change(marked)
            assert marked == plain and isinstance(marked, str)
            assert len(marks_of(marked)) == len(marked)
        assert set(marks_of(marked)) <= {0, 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.strip("﹏"), lambda s: s[3:-2], lambda s: s[::-1], lambda s: s * 2,
        lambda s: s.replace("-", "-"),
        lambda s: s.split("-")[1], lambda s: s.rsplit("-", 1)[0], lambda s: s.partition("-")[2],
        lambda s: s.rpartition("-")[0],
        lambda s: MarkedText("-").join(s.split("-")), lambda s: MarkedText("-%s%%%s-") % (s, s), lambda s: s.ljust(40),
        lambda s: s.rjust(40), lambda s: s.removeprefix("A"), lambda s: s.removesuffix("b"), lambda s: s + "-" + s,
        lambda s: "-" + s, lambda s: s.splitlines()[0], lambda s: "-".join(s), lambda s: s.zfill(50),
    ],
)  # fmt: skip
def test_a_mark_stays_with_its_character(change):
    """Capitals are the template's, small letters are what was said; no operation here changes case."""
    text = "AB-ab-Ca-cA-Bb-B"
    marked = change(MarkedText(text, bytes(c.isupper() for c in text)))
    for letter, mark in zip(marked, marks_of(marked), strict=True):
        assert letter.isupper() or not mark, marked


# Which template, and which special tokens


def openpangu(folder):
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(user_defined_symbols=TURNS))
    return open_pangu(folder / "tokenizer.model")


NAMES = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ additional_special_tokens }}"


@pytest.mark.parametrize(
    ("config", "older", "expected"),
    [
        ({}, {}, "<s>|[unused10]|<unk>||"),  # the tokenizer's own
        ({"eos_token": "</s>", "bos_token": None}, {}, "|</s>|<unk>||"),
        ({"eos_token": {"content": "[unused1]"}}, {"pad_token": "[unused2]"}, "<s>|[unused1]|<unk>|[unused2]|"),
        ({"eos_token": "a"}, {"eos_token": {"content": "b"}}, "<s>|b|<unk>||"),
        ({"eos_token": "a", "added_tokens_decoder": {}}, {"eos_token": "b"}, "<s>|a|<unk>||"),
        ({"additional_special_tokens": ["x", {"content": "y"}]}, {}, "<s>|[unused10]|<unk>||['x', 'y']"),
    ],
)  # fmt: skip
def test_special_tokens_are_called_as_the_folder_says(tmp_path, config, older, expected):
    tokenizer = openpangu(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": NAMES}))
    if older:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    found = with_template(tokenizer, tmp_path)
    assert chat_prompt(found, talk("x")).text == expected
    (tmp_path / "kept").mkdir()
    found.save(tmp_path / "kept")
    kept = with_template(open_pangu(tmp_path / "kept/tokenizer.model"), tmp_path / "kept")
    assert chat_prompt(kept, talk("x")) == chat_prompt(found, talk("x"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        ({"tokenizer_config.json": {"chat_template": "one"}, "chat_template.jinja": "two"}, "two"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
    ],
)
def test_the_template_is_found_where_transformers_finds_it(tmp_path, files, expected):
    tokenizer = openpangu(tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    assert chat_prompt(with_template(tokenizer, tmp_path), talk("x")).text == expected
    named = tmp_path / "other.jinja"
    named.write_text("named\n")
    assert chat_prompt(with_template(tokenizer, tmp_path, named), talk("x")).text == "named"


def test_a_folder_without_a_template_has_the_tokenizers_own_form(tmp_path):
    tokenizer = openpangu(tmp_path)
    write_config(tmp_path, eos_token="</s>")
    assert with_template(tokenizer, tmp_path) is tokenizer


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 5}, "chat_template must be a text, or a list of names and templates"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "the one named default is used; there are rag"),
        (
            {"chat_template": "<|im_start|>", "added_tokens_decoder": {"700": {"content": "<|im_start|>"}}},
            "adds '<|im_start|>' as token 700, which the chat template writes, but the tokenizer has no such token",
        ),
        ([], "tokenizer_config.json: must be a JSON object"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(tmp_path, config, message):
    tokenizer = openpangu(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        with_template(tokenizer, tmp_path)
    assert message in error.value.problems[0]


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].content }}",
        "[gMASK]<sop>{{ messages[0].content }}",
        "{{ '[gMASK]' }}{{ '<sop>' + messages[0].content }}",
        "[gMASK]{{ '' }}<sop>{{ messages[0].content }}",
    ],
)
def test_what_every_text_begins_with_stands_there_once(tmp_path, text):
    glm4_files(tmp_path)
    tokenizer = TemplatedTokenizer(open_code(tmp_path / "tokenizer.json"), ChatTemplate(Path("t"), text))
    plain = tokenizer.encode_text("the")
    assert chat_prompt(tokenizer, talk("the")).tokens == (*tokenizer.prefix, *plain)
    # As somebody's words it is text, and does not take the place of the real one.
    hostile = chat_prompt(tokenizer, talk("[gMASK]<sop>"))
    assert hostile.tokens == (*tokenizer.prefix, *tokenizer.encode_text("[gMASK]<sop>"))


def test_ids_are_those_of_transformers(tmp_path):
    """Of a tokenizer.json and a template with tokens of its own."""
    transformers = pytest.importorskip("transformers")
    glm4_files(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    text = TEMPLATES["glm 4: writes its own prefix"]
    write_config(tmp_path, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|endoftext|>", chat_template=text)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = with_template(open_code(tmp_path / "tokenizer.json"), tmp_path)
    for messages in TALKS.values():
        expected = other.apply_chat_template([m._asdict() for m in messages], add_generation_prompt=True)
        assert list(chat_prompt(ours, messages).tokens) == expected


def test_a_tokenizer_that_stops_elsewhere_than_the_model_is_refused(tmp_path):
    openpangu(tmp_path)
    model = ModelConfig(vocab_size=1024, hidden_size=8, num_layers=1, num_heads=1, seq_len=8, eod_id=9)
    with pytest.raises(ConfigError, match=r"ends documents with token 13, the model with eod_id 9; use the tokenizer"):
        load_tokenizer("pangu", tmp_path / "tokenizer.model", model)
