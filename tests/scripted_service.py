# SPDX-License-Identifier: Apache-2.0
"""A server's application over a model that says what the test has written down, one byte a token."""

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import uvicorn
from vocabularies import glm4_files

from codegeex.tokenizer import open_tokenizer
from sporeloom.data.chat_template import with_template
from sporeloom.inference.formats import CALLS, REASONING, ChatFormat
from sporeloom.inference.requests import NewToken
from sporeloom.serve.app import build_app
from sporeloom.serve.config import ServeConfig, ServedModel, ServeJob
from sporeloom.strategy.config import SINGLE_DEVICE

TEMPLATE = """\
{%- for tool in tools or [] %}({{ tool | tojson }}){% endfor %}
{%- for m in messages %}<{{ m.role }} {{ m.tool_call_id }}>{{ m.reasoning_content }}|{{ m.content }}
{%- for call in m.tool_calls or [] %}[{{ call.id }} {{ call.function.name }}
{{- call.function.arguments | tojson }}]{% endfor %}
{%- endfor %}<assistant>{{ '' if enable_thinking is not defined else 'think' if enable_thinking else 'quick' }}"""


class Service:
    """Answers each text with the bytes of `says`, then the end token.

    Args:
        folder: for the tokenizer's files.
        flags: of the server.
    """

    state, failure, progress, num_waiting = "ready", "", "", 0
    load = SimpleNamespace(running=0, used_slots=0.0, reused_tokens=0, drafts=0, drafted=0, accepted=0)

    def __init__(self, folder: Path, says: str = "", file_keys=(), **flags):
        glm4_files(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        self.tokenizer = with_template(open_tokenizer(folder / "tokenizer.model"), folder)
        form = ChatFormat(REASONING["think"], CALLS["hermes"])
        models = (ServedModel("town", self.tokenizer, (self.tokenizer.eod_id,), form=form),)
        config = ServeConfig(checkpoint=Path("town"), port=0, allowed_hosts=("m",), **flags)
        self.job = ServeJob(
            config, "codegeex", SimpleNamespace(seq_len=4096), SINGLE_DEVICE, models, file_keys=file_keys
        )
        self.says, self.wanted, self.waiting, self.app = says, [], {}, build_app(self)

    def submit(self, wanted, notify):
        self.wanted.append(wanted)
        made = []
        for token in [*self.says.encode(), self.tokenizer.eod_id]:
            made.append(token)
            reason = "stop" if wanted.is_finished(made) else "length" if len(made) == wanted.max_new_tokens else None
            notify(NewToken(0, token, -0.5, 0.01, reason))
            if reason:
                break
        return len(self.wanted)

    def cancel(self, ticket):
        pass

    def waiting_clients(self):
        return self.waiting

    def prompt(self) -> str:
        """The last prompt."""
        return self.tokenizer.decode(list(self.wanted[-1].prompt))

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://m")

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url="http://m/v1", api_key="none", http_client=self.http(), max_retries=0)


@contextlib.contextmanager
def listening(service):
    """The address of a server on this machine."""
    config = uvicorn.Config(service.app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
