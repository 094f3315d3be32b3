# SPDX-License-Identifier: Apache-2.0
"""The server's page in a headless Chromium, as people use it; and chats, of a model that was taught to."""

import openai
import pytest
from browser import browse, needs_chromium
from serving import adapter_folder, chatting_checkpoint, serving

from sporeloom.models.adapters import LoRAConfig

pytestmark = pytest.mark.slow

PROMPT = "小镇的早晨"


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    helper = adapter_folder(folder / "helper", checkpoint, LoRAConfig(target_modules=("mlp.up",)), 0)
    words = ("--served-model-name", "town", "--lora-modules", f"helper={helper}")
    with serving(folder / "log", checkpoint, *words) as running:
        yield running


async def ready(page):
    await page.until("$('status').textContent === 'ready'")


async def press(page, key):
    for kind in ("keyDown", "keyUp"):
        await page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


@needs_chromium
def test_a_text_is_continued_and_its_tokens_explained(server, tmp_path):
    async def work(page):
        await ready(page)
        assert await page.run("document.title") == "town"
        assert await page.run("$('tab-chat').disabled")  # a base model
        assert await page.run("[...$('models').options].map(each => each.value).join()") == "town,helper"
        await page.run("$('models').value = 'helper'; $('models').dispatchEvent(new Event('change'))")
        await page.run(
            f"$('prompt').value = '{PROMPT}'; $('seed').value = 3; $('max_tokens').value = 12; $('prompt').focus()"
        )
        await page.call(
            "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", modifiers=2, windowsVirtualKeyCode=13
        )
        await page.until("$('status').textContent.includes('a second')")
        await page.run("$('out').focus()")
        await press(page, "ArrowRight")
        await page.shoot(tmp_path / "page.png")
        return {
            "text": await page.run("$('out').textContent"),
            "told": await page.run("$('status').textContent"),
            "tip": await page.run("$('tip').hidden ? '' : $('tip').textContent"),
            "colour": await page.run("document.querySelector('.token').style.background"),
            "complaints": page.complaints,
        }

    seen = browse(server.url, tmp_path / "profile", work)
    expected = server.complete(model="helper", prompt=PROMPT, max_tokens=12, seed=3, temperature=0.8, top_p=0.95)
    assert seen["text"] == PROMPT + expected["choices"][0]["text"]
    assert seen["told"].startswith("12 tokens") and "seed 3" in seen["told"]
    assert "%" in seen["tip"] and "or" in seen["tip"]
    assert seen["colour"] and seen["complaints"] == []
    assert (tmp_path / "page.png").stat().st_size > 10_000


@needs_chromium
def test_it_stops_when_it_is_told_to_and_fits_a_phone(server, tmp_path):
    def is_long(seed):
        answer = server.complete(prompt=PROMPT, max_tokens=80, seed=seed, temperature=1.5, top_p=0.95)
        return answer["choices"][0]["finish_reason"] == "length"

    seed = next(seed for seed in range(100) if is_long(seed))

    async def work(page):
        await ready(page)
        await page.run(f"$('prompt').value = '{PROMPT}'; $('max_tokens').value = 80; $('seed').value = {seed}")
        await page.run("$('temperature').value = 1.5; $('go').click()")
        await page.until("document.querySelectorAll('.token').length > 2")
        await page.run("$('stop').click()")
        await page.until("$('status').textContent.startsWith('stopped after')")
        await page.run("$('prompt').value = ''")
        await page.run("$('go').click()")
        assert await page.run("$('status').textContent") == "there is no text yet"
        return await page.run("document.documentElement.scrollWidth <= innerWidth"), page.complaints

    fits, complaints = browse(server.url, tmp_path / "profile", work, 390, 844)
    assert fits and complaints == []


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    with serving(folder / "log", chatting_checkpoint(folder), "--served-model-name", "talker") as running:
        yield running


ASKED = {"model": "talker", "messages": [{"role": "user", "content": "小镇"}], "max_completion_tokens": 8, "seed": 3}


def test_a_chat_is_an_answer_in_the_models_own_form(chatting):
    client = openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="none")
    whole = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert (choice.message.role, whole.usage.completion_tokens) == ("assistant", len(choice.logprobs.content))
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    parts = list(client.chat.completions.create(**ASKED, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content for part in parts) == choice.message.content
    prompt = "[unused9]系统：[unused10][unused9]用户：小镇[unused10][unused9]助手："
    same = client.completions.create(model="talker", prompt=prompt, max_tokens=8, seed=3)
    assert same.choices[0].text == choice.message.content
    for change, message in (
        ({"messages": []}, "messages is missing or empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role must be one of system, user, assistant, tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "the chat template of talker has no tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**{**ASKED, **change})


@needs_chromium
def test_the_page_chats(chatting, tmp_path):
    async def work(page):
        await ready(page)
        await page.run(
            "$('tab-chat').click(); $('message').value = '小镇'; $('seed').value = 3; $('max_tokens').value = 8"
        )
        await page.run("$('top_p').value = 1; $('temperature').value = 1; $('go').click()")
        await page.until("$('status').textContent.includes('a second')")
        turns = await page.run("[...document.querySelectorAll('.turn .out')].map(each => each.textContent)")
        return turns, page.complaints

    turns, complaints = browse(chatting.url, tmp_path / "profile", work)
    answer = chatting.client.post("/v1/chat/completions", json=ASKED).json()["choices"][0]["message"]["content"]
    assert turns == ["小镇", answer] and complaints == []
