# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and counted, against one that answers as told."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.serve.bench import BenchServeConfig, bench, prompts_of


@pytest.fixture
def server():
    """(address, bodies it was sent); it answers chats with two pieces of text, whose characters are no ends of lines, and
    counts no tokens."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            for delta in (
                {"role": "assistant", "content": ""},
                {"content": "a\u2028\x85"},
                {"content": "\x0c\r\n"},
                {},
            ):
                event = {"choices": [{"index": 0, "delta": delta}]}
                self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\r\n\r\n")

        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            for name, count in (("draft", 10 * len(bodies)), ("accepted", 4 * len(bodies)), ("other", 1)):
                self.wfile.write(f'vllm:spec_decode_num_{name}_tokens_total{{engine="0"}} {count}.0\n'.encode())

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", bodies
        http.shutdown()
        thread.join(10)


def chat(url, **more):
    config = {"endpoint": "/v1/chat/completions", "model": "m", "num_prompts": 3, "num_warmups": 0, **more}
    return asyncio.run(bench(BenchServeConfig(base_url=url, **config)))


def test_chats_are_asked_in_messages_and_their_pieces_counted(server, tmp_path):
    url, bodies = server
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    told = chat(url, dataset_name="custom", dataset_path=path)
    assert (told["completed"], told["failed"], told["total_output_tokens"]) == (3, 0, 6)
    assert bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert "prompt" not in bodies[0] and "ignore_eos" not in bodies[0]


def test_token_ids_are_no_chat(server):
    with pytest.raises(ConfigError, match="takes texts: give --dataset-name custom"):
        chat(server[0])


def test_what_the_server_drafted_meanwhile_is_read_from_its_metrics(server, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    told = chat(server[0], dataset_name="custom", dataset_path=tmp_path / "prompts.jsonl", num_warmups=1)
    assert (told["spec_decode_draft_tokens"], told["spec_decode_acceptance_rate"]) == (30, 0.4)


def test_random_prompts_may_share_a_prefix_and_are_otherwise_the_same():
    sizes = {"num_prompts": 5, "input_len": 7, "vocab_size": 500, "seed": 3}
    alone = prompts_of(BenchServeConfig(**sizes))
    shared = prompts_of(BenchServeConfig(**sizes, random_prefix_len=4))
    assert [prompt[4:] for prompt in shared] == alone and len({tuple(prompt) for prompt in alone}) == 5
    assert {len(prompt) for prompt in shared} == {11} and len({tuple(prompt[:4]) for prompt in shared}) == 1
