# SPDX-License-Identifier: Apache-2.0
"""/v1/completions: the best of several choices, log-probabilities of the prompt."""

import asyncio

import pytest
from scripted_service import Service

from sporeloom.inference.requests import NewToken, PromptScores
from sporeloom.inference.sampling import TokenScore


class Drawn(Service):
    """Each choice has a text and a log-probability of its own; prompts are scored where that is asked."""

    LIKELY = (-3.0, -1.0, -2.0, -1.0)

    def submit(self, wanted, notify):
        self.wanted.append(wanted)
        if wanted.score_prompt:
            scores = [TokenScore(t, -float(t), ((t + 1, -0.25), (t, -float(t)))) for t in wanted.prompt[1:]]
            notify(PromptScores(0, scores, None if wanted.max_new_tokens else "length"))
        if wanted.max_new_tokens:
            notify(NewToken(0, 97 + wanted.stream, self.LIKELY[wanted.stream], 0.01, "length"))
        return len(self.wanted)


def post(service, headers=None, /, **body):
    async def work():
        async with service.http() as http:
            return await http.post("/v1/completions", json={"max_tokens": 1, **body}, headers=headers)

    return asyncio.run(work())


@pytest.mark.parametrize(("n", "best"), [(1, [["b"]]), (2, [["b", "d"]]), (3, [["b", "d", "c"]])])
def test_the_most_likely_of_several_are_returned_the_first_among_equals(tmp_path, n, best):
    told = post(Drawn(tmp_path), prompt=["x", "y"], n=n, best_of=4).json()
    assert [choice["text"] for choice in told["choices"]] == best[0] * 2
    assert [choice["index"] for choice in told["choices"]] == list(range(2 * n))
    assert told["usage"]["completion_tokens"] == 8


def test_best_of_is_at_least_n_and_not_streamed(tmp_path):
    for body, said in (({"n": 3, "best_of": 2}, "at least n"), ({"best_of": 2, "stream": True}, "with stream")):
        refused = post(Drawn(tmp_path), prompt="x", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
        assert said in refused.json()["error"]["message"]


@pytest.mark.parametrize(("body", "has_scores"), [({}, False), ({"logprobs": 0}, True), ({"best_of": 2}, True)])
def test_log_probabilities_are_computed_only_where_an_answer_needs_them(tmp_path, body, has_scores):
    service = Drawn(tmp_path)
    assert post(service, prompt="ab", **body).status_code == 200
    assert {wanted.has_scores for wanted in service.wanted} == {has_scores}


def test_the_prompts_tokens_are_scored_as_vllm_tells_them(tmp_path):
    service = Drawn(tmp_path)
    ids = service.tokenizer.encode("ab")
    told = post(service, prompt="ab", prompt_logprobs=1, logprobs=0).json()["choices"][0]
    assert len(told["prompt_logprobs"]) == len(ids) and told["prompt_logprobs"][0] is None
    assert told["prompt_logprobs"][-1] == {
        "98": {"logprob": -98.0, "rank": None, "decoded_token": "b"},
        "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
    }
    assert told["logprobs"]["tokens"] == ["a"]  # of the answer alone
    assert service.wanted[0].num_top == 1
    echoed = post(service, prompt="ab", prompt_logprobs=0, logprobs=0, echo=True, max_tokens=0).json()["choices"][0]
    assert echoed["logprobs"]["token_logprobs"][1:] == [
        next(iter(entry.values()))["logprob"] for entry in echoed["prompt_logprobs"][1:]
    ]
    assert post(service, prompt="ab", prompt_logprobs=0, stream=True).json()["error"]["param"] == "prompt_logprobs"
    assert "prompt_logprobs" not in post(service, prompt="ab").json()["choices"][0]


def test_priority_and_client_go_with_a_request_and_change_nothing_else(tmp_path):
    service = Drawn(tmp_path, file_keys=("one", "two"), api_key="zero")
    told = []
    for key, priority in (("zero", 0), ("one", -3), ("two", 9)):
        headers = {"Authorization": f"Bearer {key}"}
        told.append(post(service, headers, prompt="x", seed=1, priority=priority).json()["choices"])
    assert [(each.client, each.priority) for each in service.wanted] == [(0, 0), (1, -3), (2, 9)]
    assert told[0] == told[1] == told[2]
    assert post(service, {"Authorization": "Bearer three"}, prompt="x").status_code == 401
    refused = post(service, {"x-api-key": "two"}, prompt="x", priority=0.5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_each_client_has_a_part_of_the_queue(tmp_path):
    service = Drawn(tmp_path, file_keys=("one", "two"), max_queue=4, max_num_seqs=2)
    service.num_waiting, service.waiting = 6, {0: 6}  # as many as there may be

    def statuses(key):
        return [post(service, {"x-api-key": key}, prompt="x", n=n).status_code for n in (1, 3, 4)]

    assert statuses("one") == [429] * 3 and statuses("two") == [200, 200, 429]
    service.waiting = {0: 6, 1: 2}
    assert statuses("two") == [200, 429, 429]


def test_a_salt_has_256_characters_at_most(tmp_path):
    service = Drawn(tmp_path)
    assert post(service, prompt="x", cache_salt="小" * 256).status_code == 200
    refused = post(service, prompt="x", cache_salt="s" * 257)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
