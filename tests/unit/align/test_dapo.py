# SPDX-License-Identifier: Apache-2.0
"""DAPO's dynamic sampling and treatment of long texts, CISPO, and rewards from a server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from sporeloom.align.advantages import has_contrast, overlong_penalties
from sporeloom.align.rewards import load_reward, rewards_of
from sporeloom.core.errors import ConfigError
from sporeloom.nn.objectives import Policy
from sporeloom.tasks.grpo import GRPO
from sporeloom.tasks.policy import PolicyTask
from sporeloom.tasks.rollouts import SampledText
from sporeloom.train.tuning import GRPOConfig


def test_the_penalty_of_long_texts_grows_over_the_buffer():
    found = overlong_penalties(np.array([0, 6, 7, 8, 9, 10]), 10, 4)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -0.75, -1])


def test_a_group_teaches_something_where_its_rewards_differ():
    assert has_contrast(np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]), 2).tolist() == [False, True, False]


def test_cispo_weighs_the_gradient_of_each_token_by_its_clipped_ratio():
    draw = np.random.default_rng(3)
    log_probs, old, advantages = (draw.standard_normal((3, 4)) for _ in range(3))
    weights, zeros = np.full((3, 4), 1 / 12), np.zeros((3, 4))
    mindspore.set_device("CPU")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)  # whatever a test before this one has set
    objective = Policy(0.2, 0.5, is_cispo=True)
    inputs = [Tensor(each.astype(np.float32)) for each in (log_probs, weights, advantages, old, zeros, zeros)]
    loss, numbers = objective.of(*inputs)
    gradient = mindspore.grad(lambda *given: objective.of(*given)[0])(*inputs)
    ratio = np.exp(log_probs - old)
    factor = -advantages * np.minimum(ratio, 1.5) / 12
    assert float(loss) == pytest.approx((factor * log_probs).sum(), rel=1e-5)
    np.testing.assert_allclose(gradient.asnumpy(), factor, rtol=1e-5)
    assert float(numbers[0]) == (ratio > 1.5).sum() > 0


def config(**flags):
    given = {"data": "x", "from_checkpoint": "y", "batch_size": 4, "num_generations": 2, "max_completion_length": 8}
    return GRPOConfig(**{**given, **flags})


def task(draws, monkeypatch, **flags):
    """A task whose draws are canned: number of a draw -> rewards of its texts, which are named by draw and place."""

    def rewarded(self, draw):
        texts = [SampledText(place // 2, [draw, place], [], True) for place in range(4)]
        return texts, np.array(draws[draw])

    monkeypatch.setattr(PolicyTask, "rewarded", rewarded)
    made = object.__new__(GRPO)
    made.run = SimpleNamespace(config=config(**flags))
    return made


def test_prompts_whose_texts_are_all_alike_are_replaced(monkeypatch):
    draws = {3: [1, 1, 0, 1], 4: [0, 0, 0, 0], 5: [1, 0, 0, 1]}
    texts, rewards = task(draws, monkeypatch, max_resamples=2).rewarded(1)  # a round has three draws: 3, 4 and 5
    assert [text.tokens for text in texts] == [[3, 2], [3, 3], [5, 0], [5, 1]]
    assert rewards.tolist() == [0, 1, 1, 0]


def test_what_is_missing_is_filled_up_from_the_last_draw(monkeypatch):
    draws = {2: [1, 1, 1, 1], 3: [0, 0, 1, 0]}
    texts, rewards = task(draws, monkeypatch, max_resamples=1).rewarded(1)
    assert [text.tokens for text in texts] == [[3, 0], [3, 1], [3, 2], [3, 3]]
    assert rewards.tolist() == [0, 0, 1, 0]


def test_without_resampling_a_round_is_one_draw(monkeypatch):
    texts, _ = task({7: [1, 1, 1, 1]}, monkeypatch).rewarded(7)
    assert [text.tokens for text in texts] == [[7, 0], [7, 1], [7, 2], [7, 3]]


def test_texts_that_were_cut_off_are_left_out_of_the_loss(monkeypatch):
    made = task({}, monkeypatch, mask_truncated_completions=True, loss_type="dapo")
    texts = [SampledText(0, [1], [], has_ended) for has_ended in (True, False, True, True)]
    found = SimpleNamespace(texts=texts, rewards=np.array([1.0, 0.0, 0.0, 1.0]))
    weights, advantages, _ = made.judged(found, np.ones((4, 3), np.float32))
    np.testing.assert_allclose(weights, [[1 / 9] * 3, [0] * 3, [1 / 9] * 3, [1 / 9] * 3], rtol=1e-6)
    assert advantages[0, 0] > 0 > advantages[2, 0]  # the rewards of all texts still count in their groups


def test_settings_that_contradict_each_other_are_refused():
    found = "\n".join(config(overlong_buffer=9, loss_type="cispo", importance_sampling_level="sequence").problems())
    assert "--overlong-buffer 9 is longer than --max-completion-length 8" in found
    assert "--loss-type cispo has one ratio a token" in found


@pytest.fixture
def server(monkeypatch):
    """A server that rewards the length of completions times a column; at /short it forgets one, /broken fails."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/broken":
                self.send_error(503)
                return
            rewards = [len(text) * factor for text, factor in zip(asked["completions"], asked["factor"], strict=True)]
            answer = {"/short": {"rewards": rewards[1:]}, "/other": [1.0, 2.0]}.get(self.path, {"rewards": rewards})
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            """Be quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}"
        one.shutdown()


def asked(url):
    lines = [{"prompt": "a", "factor": 2}, {"prompt": "b", "factor": 3}]
    return rewards_of(url, load_reward(url), ["a", "b"], ["one", "three"], lines)


def test_a_server_rewards_texts_by_columns_of_their_lines(server):
    assert asked(f"{server}/score") == [6.0, 15.0]


@pytest.mark.parametrize(
    ("path", "told"),
    [("broken", "the server answered 503"), ("short", "returned 1 numbers for 2 texts"), ("other", "did not answer")],
)
def test_a_server_that_fails_is_named(server, path, told):
    with pytest.raises(ConfigError, match=told):
        asked(f"{server}/{path}")


def test_a_server_that_is_not_there_is_named(server):
    with pytest.raises(ConfigError, match="cannot be reached"):
        asked("http://127.0.0.1:9/score")
    with pytest.raises(ConfigError, match="an address without a host"):
        load_reward("http:///score")
