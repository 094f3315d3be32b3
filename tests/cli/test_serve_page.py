# SPDX-License-Identifier: Apache-2.0
"""The server's page in a headless Chromium: as people use it."""

import pytest
from browser import browse, needs_chromium
from serving import serving

pytestmark = [pytest.mark.slow, needs_chromium]

PROMPT = "小镇的早晨"


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("serve") / "log", checkpoint, "--served-model-name", "town") as running:
        yield running


async def ready(page):
    await page.until("$('told').textContent === 'ready'")


async def press(page, key):
    for kind in ("keyDown", "keyUp"):
        await page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def test_a_text_is_continued_and_its_tokens_explained(server, tmp_path):
    async def work(page):
        await ready(page)
        assert await page.run("document.title") == "town"
        assert await page.run("$('tab-chat').disabled")  # a base model
        await page.run(
            f"$('prompt').value = '{PROMPT}'; $('seed').value = 3; $('max_tokens').value = 12; $('prompt').focus()"
        )
        await page.call(
            "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", modifiers=2, windowsVirtualKeyCode=13
        )
        await page.until("$('told').textContent.includes('a second')")
        await page.run("$('out').focus()")
        await press(page, "ArrowRight")
        await page.shoot(tmp_path / "page.png")
        return {
            "text": await page.run("$('out').textContent"),
            "told": await page.run("$('told').textContent"),
            "tip": await page.run("$('tip').hidden ? '' : $('tip').textContent"),
            "colour": await page.run("document.querySelector('.token').style.background"),
            "complaints": page.complaints,
        }

    seen = browse(server.url, tmp_path / "profile", work)
    expected = server.complete(prompt=PROMPT, max_tokens=12, seed=3, temperature=0.8, top_p=0.95)
    assert seen["text"] == PROMPT + expected["choices"][0]["text"]
    assert seen["told"].startswith("12 tokens") and "seed 3" in seen["told"]
    assert "%" in seen["tip"] and "or" in seen["tip"]
    assert seen["colour"] and seen["complaints"] == []
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_it_stops_when_it_is_told_to_and_fits_a_phone(server, tmp_path):
    async def work(page):
        await ready(page)
        await page.run(
            f"$('prompt').value = '{PROMPT}'; $('max_tokens').value = 100; $('temperature').value = 1.5; $('go').click()"
        )
        await page.until("document.querySelectorAll('.token').length > 2")
        await page.run("$('stop').click()")
        await page.until("$('told').textContent.startsWith('stopped after')")
        await page.run("$('prompt').value = ''")
        await page.run("$('go').click()")
        assert await page.run("$('told').textContent") == "there is no text yet"
        return await page.run("document.documentElement.scrollWidth <= innerWidth"), page.complaints

    fits, complaints = browse(server.url, tmp_path / "profile", work, 390, 844)
    assert fits and complaints == []
