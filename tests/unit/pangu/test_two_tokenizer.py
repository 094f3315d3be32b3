# SPDX-License-Identifier: Apache-2.0
"""openPangu 2.0's tokenizer, made small in its format, and its thinking modes and tool calls in a template of its kind."""

import json
from types import SimpleNamespace

import pytest
import tokenizers
from vocabularies import write_config

from pangu.tokenizer import FILE_NAMES, open_tokenizer
from pangu.two_tokenizer import MARKERS, OpenPanguTwoTokenizer
from sporeloom.core.errors import ConfigError
from sporeloom.data.chat_template import with_template
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.inference.formats import CALLS, REASONING, ChatFormat, chat_format, thinking_variable
from sporeloom.inference.parsing import MessageParser, message_of
from sporeloom.serve.fields import Fields
from sporeloom.serve.messages import read_messages, read_tools
from sporeloom.serve.prepare import chat_tokens
from sporeloom.serve.thinking import template_variables

TEMPLATE = """\
{%- if messages[0].role == 'system' %}{% set first, rest = messages[0].content, messages[1:] %}
{%- else %}{% set first, rest = '', messages %}{% endif -%}
<|pangu_text_start|><|message_start|>system
{{ first }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<|message_end|>
{%- for m in rest %}<|message_start|>{{ m.role }}
{{ m.content }}
{%- if m.tool_calls %}<|tool_call_start|>[
{%- for call in m.tool_calls %}{{ call.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor -%}
]<|tool_call_end|>{% endif %}<|message_end|>{% endfor %}
{%- if add_generation_prompt %}<|message_start|>assistant
{{ '<think>' if thinking is not defined or thinking else '</think>' }}{% endif %}"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '{"name": "weather", "arguments": {"city": "<think>"}}'


def write(folder, names=MARKERS, special=(), begins=False):
    """A tokenizer.json; `special`: names that are not declared special; `begins`: it puts a token before each text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={sign: i for i, sign in enumerate([*alphabet, "th"])}, merges=[("t", "h")])
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.add_tokens([tokenizers.AddedToken(name, special=name not in special, normalized=False) for name in names])
    if begins:
        start = (MARKERS[0], whole.token_to_id(MARKERS[0]))
        whole.post_processor = tokenizers.processors.TemplateProcessing(f"{start[0]} $A", special_tokens=[start])
    whole.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def served(folder, **more):
    path = write(folder, **more)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = with_template(open_tokenizer(path), folder)
    return SimpleNamespace(name="two", tokenizer=tokenizer, form=chat_format(tokenizer))


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("text", ["the 小镇 \u2028\t é", "<think>the</think><|message_end|>", "", " \n th"])
def test_text_comes_back_and_names_in_it_are_text(text, special, tmp_path):
    tokenizer = open_tokenizer(write(tmp_path, special=special))
    ids = tokenizer.encode_document(text)
    assert tokenizer.decode(ids) == text and not set(ids) & set(tokenizer.special.values())
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_markers_in_a_prompt_are_tokens(special, tmp_path):
    tokenizer = open_tokenizer(write(tmp_path, special=special))
    ids = tokenizer.encode("<|message_start|>the<think>")
    assert [tokenizer.token_name(i) for i in ids] == ["<|message_start|>", "th", "e", "<think>"]
    assert tokenizer.decode(ids) == ("the<think>" if special else "the")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)
    assert tokenizer.vocab_size == 257 + len(MARKERS) and tokenizer.token_name(10**6) is None
    assert tokenizer.eod_id == tokenizer.special["<|message_end|>"]


@pytest.mark.parametrize("begins", [False, True])
def test_the_file_says_what_a_text_begins_with_and_a_template_writes_it_once(begins, tmp_path):
    model = served(tmp_path, begins=begins)
    start = model.tokenizer.special["<|pangu_text_start|>"]
    assert model.tokenizer.encode("a").count(start) == int(begins)
    assert chat_tokens(model, [ChatMessage("user", "hi")], {}).tokens.count(start) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "not a tokenizer"), (None, "it has no special token </think>"), ("é".encode("latin-1"), "not a tokenizer")],
)
def test_another_file_is_refused(content, said, tmp_path):
    path = write(tmp_path, MARKERS[:-1])
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=said):
        OpenPanguTwoTokenizer(path)


def test_a_checkpoint_folder_keeps_the_file(tmp_path):
    tokenizer = open_tokenizer(write(tmp_path))
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy")
    assert FILE_NAMES[1] == tokenizer.file_name
    assert (tmp_path / "copy" / tokenizer.file_name).read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("asked", "ends"),
    [({}, "<think>"), ({"thinking": True}, "<think>"), ({"thinking": False}, "</think>")],
)
def test_thinking_is_switched_by_the_templates_variable(asked, ends, tmp_path):
    model = served(tmp_path)
    assert thinking_variable(model.tokenizer) == "thinking"
    assert template_variables(model, {}, "none") == {"thinking": False}
    prompt = chat_tokens(model, [ChatMessage("user", "<think>")], asked)
    assert prompt.text.endswith(f"<|message_start|>assistant\n{ends}")
    assert prompt.text.startswith("<|pangu_text_start|><|message_start|>system\n<|message_end|>")
    names = [model.tokenizer.token_name(i) for i in prompt.tokens]
    assert names[-1] == ends and (names.count("<think>"), names.count("</think>")) == (
        (1, 0) if ends == "<think>" else (0, 1)
    )


def test_tools_calls_and_results_reach_the_template(tmp_path):
    model = served(tmp_path)
    called = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "X"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [called]}]
    body = {"tools": [WEATHER], "messages": [*messages, {"role": "tool", "tool_call_id": "c", "content": "rain"}]}
    prompt = chat_tokens(model, read_messages(Fields(body)), {}, tools=read_tools(Fields(body)))
    written = '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "X"}}]<|tool_call_end|><|message_end|>'
    assert json.dumps(WEATHER) in prompt.text and f"assistant\n{written}<|message_start|>tool\nrain" in prompt.text
    names = [model.tokenizer.token_name(i) for i in prompt.tokens]
    assert names.count("<|tool_call_start|>") == names.count("<|tool_call_end|>") == 1


FORM = ChatFormat(REASONING["think"], CALLS["openpangu2"])


def test_the_form_of_its_answers_is_found_in_the_template(tmp_path):
    assert served(tmp_path).form == FORM


@pytest.mark.parametrize(
    ("thinks", "text", "reasoning", "content", "cities"),
    [
        (True, "hm </think>yes", "hm", "yes", []),
        (True, "cut off", "cut off", "", []),
        (True, f"hm</think>so <|tool_call_start|>[{CALL}]<|tool_call_end|>", "hm", "so", ["<think>"]),
        (True, f"hm<|tool_call_start|>[{CALL}, {CALL}]<|tool_call_end|>", "hm", None, ["<think>"] * 2),
        (False, "yes", None, "yes", []),
        (False, f"<|tool_call_start|>[{CALL}]<|tool_call_end|>", None, None, ["<think>"]),
        (False, "<|tool_call_start|>[{]<|tool_call_end|>", None, "<|tool_call_start|>[{]<|tool_call_end|>", []),
    ],
)
def test_its_answers_are_reasoning_then_content_then_a_list_of_calls(thinks, text, reasoning, content, cities):
    for cut in range(len(text) + 1):
        parser = MessageParser(FORM, thinks, str)
        told = message_of([*parser.add(text[:cut]), *parser.add(text[cut:]), *parser.end()])
        calls = [call["function"] for call in told.get("tool_calls", ())]
        assert (told.get("reasoning_content"), told["content"]) == (reasoning, content), cut
        assert [json.loads(call["arguments"])["city"] for call in calls] == cities
        assert {call["name"] for call in calls} <= {"weather"}


def test_a_configuration_that_adds_a_token_elsewhere_is_refused(tmp_path):
    write_config(tmp_path, added_tokens_decoder={"3": {"content": "<think>"}})
    with pytest.raises(ConfigError, match="adds '<think>' as token 3"):
        served(tmp_path)


def test_added_tokens_outside_ascii_are_decoded_as_their_bytes_are(tmp_path):
    tokenizer = open_tokenizer(write(tmp_path, names=(*MARKERS, "höy"), special=("höy",)))
    ids = [*tokenizer.encode_document("th"), tokenizer.special["höy"], tokenizer.special["<think>"]]
    assert tokenizer.decode(ids) == "thhöy" == b"".join(map(tokenizer.token_bytes, ids)).decode()
