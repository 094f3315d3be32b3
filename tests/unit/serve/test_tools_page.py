# SPDX-License-Identifier: Apache-2.0
"""Tools on the server's page in a headless Chromium: defined, called, answered, changed and kept."""

import json

from browser import needs_chromium
from test_markdown_page import READY, TURNS, press_enter, say, use

pytestmark = needs_chromium

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "clock")
]
CALLS = """<think>Ask.</think><tool_call>
{"name": "weather", "arguments": {"city": "<b>X</b>", "days": [12345678901234567890, {}]}}
</tool_call><tool_call>
{"name": "clock", "arguments": {}}
</tool_call>"""
FIELDS = "document.querySelectorAll('.turn textarea')"
PARTS = "[e.open, e.firstChild.textContent, e.lastChild.textContent]"
FOLDED = f"[...document.querySelectorAll('.turn details')].map(e => {PARTS})"


async def define(page, text):
    await page.run(f"$('tools').value = {json.dumps(text)}; $('tools').dispatchEvent(new Event('input'))")
    await page.run("$('tools').dispatchEvent(new Event('change'))")


async def answer(page, place, text):
    """Type the result of a call."""
    await page.run(f"{FIELDS}[{place}].focus()")
    await page.call("Input.insertText", text=text)


EDIT = "[...document.querySelectorAll('.turn button')].find(each => each.textContent === 'Edit results').click()"


async def finished(page):
    await page.until("!running && $('status').textContent.includes('a second')")


async def called(page):
    """Begin a chat whose answer has two calls."""
    await define(page, json.dumps(TOOLS))
    await page.run("$('max_tokens').value = 999")
    await say(page, "Rain?")


def test_calls_are_shown_answered_changed_and_kept(tmp_path):
    async def work(page, service):
        found = {}
        await called(page)
        found["prompt"], found["told"] = service.prompt(), await page.run("$('status').textContent")
        found["folded"], found["html"] = (
            await page.run(FOLDED),
            await page.run("document.querySelectorAll('pre b').length"),
        )
        found["labels"] = await page.run(f"[...{FIELDS}].map(each => each.labels[0].firstChild.textContent)")
        await answer(page, 0, "sun")
        await press_enter(page)
        found["missing"] = await page.run(
            "[$('status').textContent, document.activeElement.dataset.call, chat.turns.length]"
        )
        await page.run("$('status').textContent = ''")
        service.says = "Bring **nothing**."
        await answer(page, 1, "noon")
        await press_enter(page)
        await finished(page)
        found["answered"], found["turns"] = service.prompt(), await page.run(TURNS)
        await page.call("Page.reload")
        await page.until(READY)
        await page.run("$('tab-chat').click()")
        found["kept"] = (
            await page.run(FOLDED),
            await page.run("JSON.parse($('tools').value).length"),
            await page.run(FIELDS + ".length"),
        )
        await page.run(EDIT)
        await answer(page, 0, "never sent")
        await page.run("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }))")
        found["cancelled"] = await page.run(FOLDED), await page.run(TURNS)
        await page.run(EDIT)
        await page.run(f"{FIELDS}[0].value = ''")
        await answer(page, 0, "storm")
        service.says = "Stay."
        await press_enter(page)
        await finished(page)
        found["changed"] = service.prompt(), await page.run(TURNS)
        return found

    found = use(tmp_path, work, CALLS)
    assert all(json.dumps(tool) in found["prompt"] for tool in TOOLS) and "finished: tool calls" in found["told"]
    shown = '{\n  "city": "<b>X</b>",\n  "days": [\n    12345678901234567890,\n    {}\n  ]\n}'
    calls = [[False, "Reasoning", "Ask."], [False, "Call of weather", shown], [False, "Call of clock", "{}"]]
    assert found["folded"] == calls and found["html"] == 0
    assert [label.split(" (")[0] for label in found["labels"]] == ["Result of weather", "Result of clock"]
    assert found["missing"] == ["the result of clock is not there yet", "1", 2]
    ids = [call.split()[0] for call in found["answered"].split("[call")[1:]]
    sent = f"<tool call{ids[0]}>|sun<tool call{ids[1]}>|noon<assistant>"
    assert len(set(ids)) == 2 and found["answered"].endswith(sent)
    assert "<assistant >Ask.|" in found["answered"] and "weather{" in found["answered"]
    assert found["turns"] == ["Rain?", "Bring nothing."]
    results = [[False, "Result of weather", "sun"], [False, "Result of clock", "noon"]]
    kept = [calls[0], calls[1], results[0], calls[2], results[1]]
    assert found["kept"] == (kept, 2, 0)
    assert found["cancelled"] == (kept, found["turns"])
    assert found["changed"] == (found["answered"].replace("|sun<", "|storm<"), ["Rain?", "Stay."])


def test_what_is_wrong_is_said_and_no_text_is_lost(tmp_path):
    wrong = {
        "[": "not JSON",
        "{}": "must be a list",
        '[{"type": "function"}]': "tools[0] must be",
        '[{"type": "function", "function": {"name": "a b"}}]': "tools[0].function.name must be",
        '[{"type": "function", "function": {"name": "f", "parameters": []}}]': "must be a JSON schema",
        json.dumps([TOOLS[0], TOOLS[0]]): "two functions are named weather",
        "": "",
    }

    async def work(page, service):
        said = {}
        for text in wrong:
            await define(page, text)
            said[text] = await page.run("$('tools-problem').textContent"), await page.run("$('tools').ariaInvalid")
        await define(page, "[")
        await page.run("$('message').value = 'mine'; $('go').click()")
        refused = await page.run(
            "[$('message').value, $('status').textContent, $('tools-box').open, chat.turns.length]"
        )
        await called(page)
        for place, text in enumerate(("sun", "noon")):
            await answer(page, place, text)
        await page.run("$('temperature').value = -1")
        await press_enter(page)
        await page.until("!running && $('status').className === 'bad'")
        failed = await page.run(f"[$('status').textContent, ...[...{FIELDS}].map(each => each.value)]")
        await page.run("$('temperature').value = 1")
        service.says = '<tool_call>{"name": "weather", "arguments": {"city": "'
        await press_enter(page)
        await finished(page)
        return said, refused, failed, service.prompt(), await page.run(TURNS)

    said, refused, failed, prompt, turns = use(tmp_path, work, CALLS, width=390)
    for text, message in wrong.items():
        assert message in said[text][0] and bool(said[text][0]) == bool(message), text
        assert said[text][1] == ("true" if message else "false")
    assert refused[0] == "mine" and refused[1].startswith("tools: not JSON") and refused[2:] == [True, 0]
    assert "temperature must be" in failed[0] and failed[1:] == ["sun", "noon"]
    assert "|sun<" in prompt and "|noon<" in prompt and len(turns) == 2


def test_a_call_that_was_cut_off_is_shown_and_not_sent(tmp_path):
    parts = [{"index": 0, "id": "c", "function": {"name": "weather", "arguments": ""}}]
    parts += [{"index": 0, "function": {"arguments": text}} for text in ('{"city": ', '"X')]

    async def work(page, service):
        await define(page, json.dumps(TOOLS))
        script = f"""events = async function* () {{ for (const part of {json.dumps(parts)})
            yield {{ seed: 1, choices: [{{ delta: {{ tool_calls: [part] }}, logprobs: null, finish_reason: null }}] }};
            yield {{ seed: 1, choices: [{{ delta: {{}}, logprobs: null, finish_reason: "length" }}] }}; }}"""
        await page.run(f"globalThis.real = events; {script}")
        await say(page, "one")
        cut = await page.run(FOLDED), await page.run(FIELDS + ".length")
        await page.run("events = real")
        await say(page, "two")
        return cut, service.prompt()

    (folded, fields), prompt = use(tmp_path, work, "Yes.")
    assert folded == [[False, "Call of weather (cut off: it is not sent)", '{"city": "X']] and fields == 0
    assert prompt.endswith("<user >|one<assistant >|<user >|two<assistant>")
