# SPDX-License-Identifier: Apache-2.0
"""Chats on the server's page in a headless Chromium, with a model that says what the test has written down."""

import json

from browser import browse, needs_chromium
from scripted_service import Service, listening

pytestmark = needs_chromium

SAID = """<think>A *thought*.</think>
# Title

Some **bold**, *slanted*, `a < b` and [a link](https://example.org/x) <img src=x onerror="document.title='taken'">
[bad](javascript:alert(1))

1. one
2. two

```python
print("<b>")
```

| a | b |
|---|---|
| 1 | 2 |
"""


def use(tmp_path, work, says=SAID, width=1200, **flags):
    """Let `work` use the chat of a page. Returns what it returns."""
    service = Service(tmp_path, says, **flags)

    async def chatting(page):
        await page.until("$('status').textContent === 'ready'")
        await page.run("$('tab-chat').click()")
        found = await work(page, service)
        assert [each for each in page.complaints if '"source": "network"' not in each] == []
        return found

    with listening(service) as address:
        return browse(address, tmp_path / "profile", chatting, width)


async def press_enter(page, shift=False):
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r", "modifiers": 8 if shift else 0}
    await page.call("Input.dispatchKeyEvent", type="keyDown", **key)
    await page.call("Input.dispatchKeyEvent", type="keyUp", **{**key, "text": ""})


async def say(page, text):
    await page.run(f"$('status').textContent = ''; $('message').value = {json.dumps(text)}; $('message').focus()")
    await press_enter(page)
    await page.until("$('status').textContent.includes('a second')")


TURNS = "[...document.querySelectorAll('.turn .out')].map(each => each.textContent)"


def test_an_answer_is_markdown_and_nothing_of_it_is_html(tmp_path):
    async def work(page, service):
        await page.run("$('max_tokens').value = 999")
        await say(page, "**hi** <b>")
        answer = "document.querySelectorAll('.turn')[1].querySelector('.out')"
        found = {
            name: await page.run(f"[...{answer}.querySelectorAll('{name}')].map(each => each.textContent)")
            for name in ("h1", "strong", "em", "code", "li", "th", "td", "img", "b", "script")
        }
        links = await page.run(f"[...{answer}.querySelectorAll('a')].map(each => [each.href, each.rel])")
        folded = await page.run(
            "[...document.querySelectorAll('details.reasoning')].map(e => [e.open, e.lastChild.textContent])"
        )
        await page.run("document.querySelector('pre button').click()")
        await page.until("$('status').textContent === 'copied'")
        title, user = await page.run("document.title"), await page.run(f"{TURNS}[0]")
        await page.run("$('tokens').click()")
        tokens = await page.run(f"{answer}.querySelectorAll('.token').length")
        return found, links, folded, title, user, tokens

    found, links, folded, title, user, tokens = use(tmp_path, work)
    assert found == {
        **{"h1": ["Title"], "strong": ["bold"], "em": ["slanted"], "code": ["a < b", 'print("<b>")']},
        **{"li": ["one", "two"], "th": ["a", "b"], "td": ["1", "2"], "img": [], "b": [], "script": []},
    }
    assert links == [["https://example.org/x", "noopener noreferrer"]]
    assert folded == [[False, "A *thought*."]] and title == "town" and user == "**hi** <b>"
    assert tokens > 100


def test_a_message_is_sent_edited_and_answered_again(tmp_path):
    async def work(page, service):
        await page.run("$('message').focus(); $('message').value = 'a'")
        await press_enter(page, shift=True)
        assert await page.run("$('turns').children.length") == 0  # a line was begun
        await page.run("$('system').value = 'be kind'; $('system').dispatchEvent(new Event('change'))")
        await say(page, "one")
        prompts = [service.prompt()]
        service.says = "Second."
        await say(page, "two")
        prompts.append(service.prompt())
        service.says = "Again."
        press = "[...document.querySelectorAll('.turn')].at({}).querySelectorAll('button')[1].click()"
        await page.run(press.format(-1))  # regenerate
        await page.until(f"{TURNS}.at(-1) === 'Again.'")
        await page.until("$('status').textContent.includes('a second')")
        regenerated = service.prompt()
        await page.run(press.format(0))  # edit the first message
        assert await page.run("$('message').value") == "one"
        service.says = "Other."
        await say(page, "uno")
        return prompts, regenerated, service.prompt(), await page.run(TURNS)

    prompts, regenerated, edited, turns = use(tmp_path, work, "First.")
    assert "be kind" in prompts[0] and regenerated == prompts[1] and "First." in prompts[1]
    assert edited == prompts[0].replace("one", "uno") and turns == ["uno", "Other."]


def test_chats_are_kept_in_the_browser_and_a_failure_keeps_the_message(tmp_path):
    async def work(page, service):
        await say(page, "first chat")
        await page.run("$('new').click()")
        await say(page, "second chat")
        await page.call("Page.reload")
        await page.until(
            "document.readyState === 'complete' && typeof $ === 'function' && $('status').textContent === 'ready'"
        )
        await page.run("$('tab-chat').click()")
        kept = await page.run("[...$('chats').options].map(each => each.textContent)")
        shown = await page.run(TURNS)
        await page.run("$('chats').selectedIndex = 1; $('chats').dispatchEvent(new Event('change'))")
        other = await page.run(TURNS)
        await page.run("$('temperature').value = -1; $('message').value = 'lost?'; $('go').click()")
        await page.until("$('status').className === 'bad'")
        failed = await page.run("[$('message').value, $('status').textContent]"), await page.run(TURNS)
        await page.run("$('delete').click()")
        left = await page.run("JSON.parse(localStorage.getItem('sporeloom.chats')).map(each => each.turns[0].content)")
        fits = await page.run("document.documentElement.scrollWidth <= innerWidth")
        return kept, shown, other, failed, left, fits

    kept, shown, other, failed, left, fits = use(tmp_path, work, "Yes.", width=390)
    assert kept == ["second chat", "first chat"]
    assert shown == ["second chat", "Yes."] and other == ["first chat", "Yes."]
    assert failed[0][0] == "lost?" and "temperature must be" in failed[0][1] and failed[1] == other
    assert left == ["second chat"] and fits


READY = "document.readyState === 'complete' && typeof $ === 'function' && $('status').textContent === 'ready'"


def test_no_answer_and_nothing_that_was_kept_stops_the_page(tmp_path):
    async def work(page, service):
        deep = await page.run(
            "(box => { box.append(...markdown('>'.repeat(5000) + 'x')); return [box.querySelectorAll('blockquote').length,"
            " box.textContent.length] })(element('div'))"
        )
        nested = await page.run("inline(element('p'), '**a *b* ~~[*c*](https://d)~~**').innerHTML")
        texts = ["'`'.repeat(30000)", "'**a'.repeat(10000)", "'~~a'.repeat(10000)", "'# ' + ' '.repeat(30000) + 'x'"]
        texts += ["'[a'.repeat(10000)", "'*a '.repeat(10000) + '[a](https://'.repeat(999)"]
        seconds = [
            await page.run(
                f"(began => {{ markdown({text}); return (performance.now() - began) / 1000 }})(performance.now())"
            )
            for text in texts
        ]
        await page.run("globalThis.written = markdown; markdown = () => { throw new RangeError('deep') }")
        await say(page, "one")
        plain = await page.run(TURNS)
        await page.run("markdown = written; globalThis.received = receive")
        await page.run("receive = async () => { globalThis.kept = localStorage.getItem(STORE); return false }")
        await page.run("[...document.querySelectorAll('.turn')].at(-1).querySelectorAll('button')[1].click()")
        await page.until("globalThis.kept")
        again = await page.run(TURNS)
        await page.run("$('new').click(); $('message').value = 'two'; go()")
        sent = await page.run("JSON.parse(kept).map(each => each.turns.map(turn => turn.content))")
        left = await page.run("JSON.parse(localStorage.getItem(STORE)).length"), await page.run("$('message').value")
        await page.run(
            "localStorage.setItem(STORE, JSON.stringify([{id: 'a', turns: [null]}, {id: 'b', turns: [{}]}]))"
        )
        await page.call("Page.reload")
        await page.until(READY)
        return deep, nested, seconds, plain, again, sent, left

    deep, nested, seconds, plain, again, sent, left = use(tmp_path, work, "**Yes**.")
    assert deep[0] == 9 and deep[1] > 4900
    assert nested.startswith("<strong>a <em>b</em> <s><a") and "<em>c</em></a></s></strong>" in nested
    assert max(seconds) < 2, seconds
    assert plain == ["one", "**Yes**."] and again == ["one", "Yes."]
    assert sent == [["two"], ["one", "**Yes**."]] and left == (1, "two")
