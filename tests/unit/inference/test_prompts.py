# SPDX-License-Identifier: Apache-2.0
"""Prompts of `generate` and examples of `sft --inspect`: from flags to tokens, of a folder with GLM-4's kind of tokenizer."""

import dataclasses
import json

import pytest
from vocabularies import glm4_files

from sporeloom.checkpoint.model_folder import write_config
from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import ChatMessage, chat_prompt, infill_prompt
from sporeloom.inference.config import GenerateConfig
from sporeloom.inference.config import check as check_generation
from sporeloom.models.family import size_config
from sporeloom.tasks.grpo import GRPO
from sporeloom.train.checks import check as check_training
from sporeloom.train.example_view import view
from sporeloom.train.policy import GRPOConfig
from sporeloom.train.tuning import DPOConfig, SFTConfig, open_tokenizer

TEMPLATE = (
    "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if think %}!{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    glm4_files(folder)
    model = size_config("codegeex", "4_tiny")
    model = dataclasses.replace(model, num_layers=1, eod_id=260, loss_ignore_id=260, stop_ids=(267, 269))
    write_config(folder, "codegeex", model)
    return folder


def generation(folder, **flags):
    return check_generation(GenerateConfig(checkpoint=folder, max_new_tokens=4, **flags), 1)


def test_prompts_are_the_tokens_of_training(folder):
    text = "a<|user|>b"
    (plain,) = (job := generation(folder, prompt=text)).prompts
    assert plain == (text, tuple(job.tokenizer.encode(text)))
    (chat,) = generation(folder, prompt=text, chat=True).prompts
    assert chat == chat_prompt(job.tokenizer, [ChatMessage("user", text)])
    (gap,) = generation(folder, prompt=text, suffix=text).prompts
    assert gap == infill_prompt(job.tokenizer, text, text)
    assert [sum(i == 267 for i in prompt.tokens) for prompt in (plain, chat, gap)] == [1, 1, 1]


def test_variables_go_to_the_template(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = {"prompt": "x", "chat": True, "chat_template_kwargs": '{"think": true}'}
    assert generation(folder, **flags).prompts[0].text == "[gMASK]<sop><|user|>x!"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prompt": "no", "chat": True}, "chat_template.jinja: chat template: not that"),
        ({"prompt": "x", "chat_template_kwargs": "{}"}, "--chat-template-kwargs is for --chat; add --chat"),
        ({"prompt": "x", "chat": True, "chat_template_kwargs": "[]"}, "--chat-template-kwargs must be a JSON object"),
        (
            {"prompt": "x", "chat": True, "chat_template_kwargs": '{"tools": 1}'},
            "--chat-template-kwargs: a variable cannot be named tools",
        ),
    ],
)
def test_what_a_template_does_not_take_is_refused_once(folder, tmp_path, flags, message):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(ConfigError) as error:
        generation(folder, **flags)
    assert len(error.value.problems) == 1 and message in error.value.problems[0]


STOPS_ELSEWHERE = r"tokenizer.json: this tokenizer ends documents with token 260, the model with eod_id 5; use"


def test_a_tokenizer_that_stops_at_another_token_is_refused_by_all_that_load_a_model(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eod_id": 5}))
    with pytest.raises(ConfigError, match=STOPS_ELSEWHERE):
        generation(folder, prompt="x")
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}\n')
    common = {"from_checkpoint": folder, "data": tmp_path / "lines.jsonl", "output_dir": tmp_path / "out"}
    for kind, more in ((SFTConfig, {}), (DPOConfig, {}), (GRPOConfig, {"reward": ("x.py:f",)})):
        with pytest.raises(ConfigError, match=STOPS_ELSEWHERE):
            open_tokenizer(check_training(kind(**common, **more), 1))


def test_inspecting_shows_special_tokens_and_ids(folder, tmp_path):
    talk = [
        *({"role": "user", "content": "the"}, {"role": "assistant", "content": "x<sop>"}),
        *({"role": "user", "content": "y"}, {"role": "assistant", "content": "z"}),
    ]
    (tmp_path / "lines.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    config = SFTConfig(from_checkpoint=folder, data=tmp_path / "lines.jsonl", output_dir=tmp_path / "out", seq_len=64)
    head, text, ids = view(check_training(config, 1), 1, False)
    assert head.endswith("1 examples; [[learned]]")
    # ... of what somebody says the name of a token is text.
    assert text.split("\n", 2)[2] == (
        "«[gMASK]»«<sop>»«<|user|>»\nthe«<|assistant|>»\n[[x<sop>«<|user|>»]]\ny«<|assistant|>»\n[[z«<|endoftext|>»]]"
    )
    learned = " ".join(map(str, [*b"x<sop>", 267]))
    assert ids == f"ids: 262 264 267 10 257 268 10 [[{learned}]] 10 121 268 10 [[122 260]]"


def test_inspecting_shows_the_prompts_with_tools_that_a_run_trains_on(folder, tmp_path):
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    template += "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "tools.yaml").write_text("tools: [{name: hour, description: '', command: [date]}]")
    line = {"prompt": [{"role": "user", "content": "when"}]}
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    common = {"from_checkpoint": folder, "data": tmp_path / "lines.jsonl", "output_dir": tmp_path / "out"}
    tools = {"tools": (str(tmp_path / "tools.yaml"),), "tool_call_parser": "hermes"}
    task = object.__new__(GRPO)
    task.run = check_training(GRPOConfig(**common, **tools, reward=("x.py:f",)), 1)
    _, shown = view(task.run, 1, False)
    (prompt,) = task.reading().prompts(task.run.data)
    assert "hour when" in shown and shown.endswith("ids: " + " ".join(map(str, prompt.tokens)))
    both = ("python", *tools["tools"])
    flags = {"tools": both, "tool_call_parser": "hermes", "allow_execution": True}
    assert (
        "python hour when" in [*view(check_training(GRPOConfig(**common, **flags, reward=("x.py:f",)), 1), 1, False)][1]
    )
