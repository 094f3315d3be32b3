# SPDX-License-Identifier: Apache-2.0
"""Adapters that are loaded and unloaded while a server runs: whatever slot they get, an answer is that of its adapter."""

import json

import httpx
import openai
import pytest
from conftest import in_process
from serving import TEXT, adapter_folder, serving

from sporeloom.core.hashes import write_hashes
from sporeloom.models.adapters import LoRAConfig

pytestmark = pytest.mark.slow

PROMPT = TEXT[:60].strip()
ADAPTERS = {
    "all": (LoRAConfig(r=4, target_modules=("*",)), 0),
    "up": (LoRAConfig(r=8, target_modules=("mlp.up",)), 1),
    "wide": (LoRAConfig(r=12, target_modules=("mlp.up",)), 2),
}


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for name, (lora, seed) in ADAPTERS.items():
        adapter_folder(root / name, checkpoint, lora, seed)
    adapter_folder(root / "torn", checkpoint, ADAPTERS["up"][0], 3)
    (root / "torn" / "adapter_model.safetensors").unlink()
    adapter_folder(root / "foreign", checkpoint, ADAPTERS["up"][0], 4)
    path = root / "foreign" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 4}))
    write_hashes(root / "foreign")
    adapter_folder(root / "elsewhere", checkpoint, ADAPTERS["up"][0], 4)
    path = root / "elsewhere" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "/etc"}))
    write_hashes(root / "elsewhere")
    (root / "link").symlink_to(checkpoint)
    return root


@pytest.fixture(scope="module")
def server(checkpoint, folders, tmp_path_factory):
    flags = ("--lora-modules", f"fixed={folders / 'all'}", "--runtime-lora-folder", folders, "--max-loras", 2)
    flags += ("--max-lora-rank", 8, "--prefill-chunk", 16, "--api-key", "secret", "--served-model-name", "town")
    with serving(tmp_path_factory.mktemp("serve") / "log", checkpoint, *flags) as running:
        assert running.client.post("/v1/load_lora_adapter", json={}).status_code == 401
        running.client.headers["Authorization"] = "Bearer secret"
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.said()


def answer(server, model):
    body = {"prompt": PROMPT, "max_tokens": 16, "seed": 3, "temperature": 0.8, "logprobs": 1, "model": model}
    (choice,) = server.complete(**body)["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def load(server, name, path):
    return server.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def unload(server, name):
    return server.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def names(server):
    return [model["id"] for model in server.client.get("/v1/models").json()["data"]]


def test_adapters_answer_the_same_from_every_slot_and_after_others_were_there(server, folders):
    base, fixed = answer(server, "town"), answer(server, "fixed")
    assert load(server, "one", "all").text == "Success: LoRA adapter 'one' added successfully."
    assert load(server, "two", folders / "up").status_code == 200
    up = answer(server, "two")
    assert answer(server, "one") == fixed and len({base[0], fixed[0], up[0]}) == 3
    assert server.client.get("/v1/models/two").json()["parent"] == "town"
    assert unload(server, "one").text == "Success: LoRA adapter 'one' removed successfully."
    assert load(server, "other", "up").status_code == 200 and answer(server, "other") == up
    assert unload(server, "two").status_code == 200 and load(server, "one", "all").status_code == 200
    assert (answer(server, "one"), answer(server, "fixed"), answer(server, "town")) == (fixed, fixed, base)
    assert names(server) == ["town", "fixed", "other", "one"]
    assert unload(server, "one").status_code == unload(server, "other").status_code == 200


def test_adapters_are_models_that_clients_name(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    assert {each.id: each.parent for each in client.models.list()} == {"town": None, "fixed": "town"}
    found = {
        name: client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=0)
        for name in ("town", "fixed")
    }
    assert {name: answer.model for name, answer in found.items()} == {"town": "town", "fixed": "fixed"}
    assert len({str(answer.choices[0].logprobs.token_logprobs) for answer in found.values()}) == 2
    unnamed = server.complete(prompt=PROMPT, max_tokens=8, temperature=0)
    assert unnamed["choices"][0]["text"] == found["town"].choices[0].text
    status, message, param = server.refused(prompt=PROMPT, model="other")
    assert (status, param) == (404, "model") and "'town', 'fixed'" in message


def test_a_text_keeps_the_adapters_that_it_began_with(server):
    assert load(server, "kept", "up").status_code == 200
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "seed": 5, "model": "kept"}
    expected = server.complete(**body)["choices"][0]["text"]
    open_request = httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, headers=server.client.headers, timeout=60
    )
    with open_request as stream:
        lines = stream.iter_lines()
        found = [next(lines)]
        assert unload(server, "kept").status_code == 200
        assert load(server, "next", "all").status_code == 200
        assert server.refused(prompt=PROMPT, model="kept")[0] == 404
        found += list(lines)
    events = [json.loads(line.removeprefix("data: ")) for line in found if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    for name in names(server)[2:]:
        assert unload(server, name).status_code == 200


REFUSED = [
    ("x", "nope", 404, "there is no folder 'nope'"),
    ("x", "../", 400, "not in the folder of --runtime-lora-folder"),
    ("x", "/etc", 400, "not in the folder of --runtime-lora-folder"),
    ("x", "link", 400, "not in the folder of --runtime-lora-folder"),
    ("x", "a\0b", 400, "is not a path"),
    ("x", "wide", 400, "has rank 12; --max-lora-rank of this server is 8"),
    ("x", "torn", 400, "torn"),
    ("x", "foreign", 400, "the model needs (4,"),
    ("x", "elsewhere", 400, "lora_path: adapters of another model than this server's"),
    ("town", "up", 400, "there is a model 'town' already"),
    ("fixed", "up", 400, "there is a model 'fixed' already"),
    ("", "up", 400, "lora_name is missing"),
    ("a\nb", "up", 400, "printable"),
]


def test_adapters_that_cannot_be_loaded_are_refused_and_change_nothing(server, folders):
    before = answer(server, "town"), answer(server, "fixed")
    for name, path, status, said in REFUSED:
        body = {"lora_name": name, "lora_path": path}
        found, message, param = server.refused("/v1/load_lora_adapter", **body)
        assert found == status and said in message and param in ("lora_name", "lora_path"), (body, message)
        assert str(folders) not in message, message
    assert server.refused("/v1/load_lora_adapter", lora_name=3, lora_path="up")[0] == 400
    for name, status in (("nobody", 404), ("fixed", 400), ("town", 400)):
        assert server.refused("/v1/unload_lora_adapter", lora_name=name)[0] == status
    assert load(server, "one", "up").status_code == load(server, "two", "up").status_code == 200
    assert "as many as --max-loras allows" in server.refused("/v1/load_lora_adapter", lora_name="x", lora_path="up")[1]
    assert unload(server, "one").status_code == unload(server, "two").status_code == 200
    assert (answer(server, "town"), answer(server, "fixed")) == before and names(server) == ["town", "fixed"]


def test_flags_without_their_folder_are_refused_before_anything_is_loaded(checkpoint, tmp_path):
    outcome = in_process("tools/serve.py", checkpoint, "--port", 0, "--max-loras", 2, "--max-lora-rank", 4)
    assert outcome.code == 2 and "--max-loras 2" in outcome.output and "--max-lora-rank 4" in outcome.output
    outcome = in_process("tools/serve.py", checkpoint, "--port", 0, "--runtime-lora-folder", tmp_path / "none")
    assert outcome.code == 2 and "there is no such folder" in outcome.output
