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
from sporeloom.align.reward_server import ServerLimits
from sporeloom.align.rewards import load_reward, rewards_of
from sporeloom.core.errors import ConfigError
from sporeloom.nn.objectives import Policy
from sporeloom.tasks.grpo import GRPO
from sporeloom.tasks.policy import PolicyTask, Round
from sporeloom.tasks.rollouts import SampledText, ToolUse
from sporeloom.train.policy import GRPOConfig


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


CUT_OFF = [True, False, True, False, False, False, True, True]
"""Whether each of eight texts ended: their groups of two are half, half, not, and entirely in the loss."""


def test_metrics_of_tokens_are_means_over_those_in_the_loss(monkeypatch):
    texts = [SampledText(0, [1] * (place + 1), [], has_ended) for place, has_ended in enumerate(CUT_OFF)]
    rewards, arrays = np.array([0.0, 1, 1, 1, 0, 1, 1, 0]), np.zeros((8, 8), np.float32)
    for is_masked, num_tokens, informative in ((True, 1 + 3 + 7 + 8, 2 / 4), (False, 36, 3 / 4)):
        made = task({}, monkeypatch, batch_size=8, max_resamples=1, mask_truncated_completions=is_masked)
        made.collected = Round(0, texts, rewards, arrays, arrays, arrays, arrays)
        found = made.metrics(0, np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32))
        assert found["clip_fraction"] == pytest.approx(1 / num_tokens)
        assert found["entropy"] == pytest.approx(5 / num_tokens)
        assert found["completion_length"] == 36 / 8 and found["ended"] == 4 / 8
        assert found["informative_groups"] == informative


def test_metrics_of_tokens_leave_out_what_tools_wrote(monkeypatch):
    masks = [(True, False, False, True), (True, True), (True, False, True), (True,)]  # 7 tokens of 10 were sampled
    texts = [SampledText(0, [1] * len(mask), [], True, ToolUse(mask, 0, [])) for mask in masks]
    old = np.array([[1.0, 0, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]], np.float32)
    made = task({}, monkeypatch, beta=0.1)
    made.collected = Round(0, texts, np.array([0.0, 1, 1, 0]), old, old, 0.5 * old, old)
    found = made.metrics(0, np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32))
    means = {"clip_fraction": 1 / 7, "kl": 2 / 7, "ratio_error": 3 / 7, "sampling_difference": 0.5, "entropy": 5 / 7}
    assert {name: found[name] for name in means} == pytest.approx(means)
    assert found["completion_length"] == 7 / 4


def test_a_group_that_was_cut_off_is_replaced_though_its_rewards_differ(monkeypatch):
    draws = {
        2: ([0, 1, 0, 1], [False, False, True, False]),  # rewards, and whether the texts ended
        3: ([1, 0, 1, 1], [False, True, True, True]),
    }
    for is_masked, places in ((True, [[2, 2], [2, 3], [3, 0], [3, 1]]), (False, [[2, 0], [2, 1], [2, 2], [2, 3]])):
        made = task({}, monkeypatch, max_resamples=1, mask_truncated_completions=is_masked)

        def rewarded(self, draw):
            rewards, ended = draws[draw]
            texts = [SampledText(0, [draw, place], [], has_ended) for place, has_ended in enumerate(ended)]
            return texts, np.array(rewards, float)

        monkeypatch.setattr(PolicyTask, "rewarded", rewarded)
        assert [text.tokens for text in made.rewarded(1)[0]] == places


@pytest.mark.parametrize(("resamples", "epochs"), [(0, "2.50 epochs"), (2, "7.50 epochs, with draws that are skipped")])
def test_epochs_are_of_all_draws(monkeypatch, resamples, epochs):
    made = task({}, monkeypatch, max_resamples=resamples, steps=10, num_iterations=2)
    made.text, made.num_samples = "4 prompts", 4  # 5 rounds of 2 prompts
    assert f"4 prompts; {epochs}" in made.describe()


def test_cispo_has_no_bound_below():
    told = "--loss-type cispo clips only above, at 1 + --epsilon-high 4; leave --epsilon 0.1 out"
    assert told in [*config(loss_type="cispo", epsilon=0.1, epsilon_high=4.0).problems()]
    for flags in ({"epsilon": 0.1}, {"epsilon_high": 4.0}):  # without --epsilon-high it is the bound above
        assert told[:36] not in "\n".join(config(loss_type="cispo", **flags).problems())


def test_settings_that_contradict_each_other_are_refused():
    found = "\n".join(config(overlong_buffer=9, loss_type="cispo", importance_sampling_level="sequence").problems())
    assert "--overlong-buffer 9 is longer than --max-completion-length 8" in found
    assert "--loss-type cispo has one ratio a token" in found


@pytest.fixture
def server(monkeypatch):
    """A server that rewards the length of completions times a column; at /short it forgets one, /broken fails, /restarting
    does the first two times, /silent never answers, /slow byte by byte."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        paths = []

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            Handler.paths.append(self.path)
            if self.path == "/broken" or (self.path == "/restarting" and Handler.paths.count(self.path) < 3):
                self.send_error(503)
                return
            if self.path == "/gone":
                self.send_error(404)
                return
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/score")
                self.end_headers()
                return
            if self.path == "/slow":
                self.send_response(200)
                self.end_headers()
                for _ in range(6):
                    self.wfile.write(b" ")
                    done.wait(0.15)
            if self.path == "/silent":
                done.wait(20)
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
        yield SimpleNamespace(url=f"http://127.0.0.1:{one.server_port}", paths=Handler.paths)
        done.set()
        one.shutdown()


def asked(url, **limits):
    lines = [{"prompt": "a", "factor": 2}, {"prompt": "b", "factor": 3}]
    reward = load_reward(url, ServerLimits(**{"retries": 0, "first_wait_s": 0.01, **limits}))
    return rewards_of(url, reward, ["a", "b"], ["one", "three"], lines)


def test_a_server_rewards_texts_by_columns_of_their_lines(server):
    assert asked(f"{server.url}/score") == [6.0, 15.0]


@pytest.mark.parametrize(
    ("path", "told"),
    [("broken", "the server answered 503"), ("short", "returned 1 numbers for 2 texts"), ("other", "did not answer")],
)
def test_a_server_that_fails_is_named(server, path, told):
    with pytest.raises(ConfigError, match=told):
        asked(f"{server.url}/{path}")


def test_a_server_that_restarts_is_asked_again(server, capsys):
    assert asked(f"{server.url}/restarting", retries=2) == [6.0, 15.0]
    assert server.paths == ["/restarting"] * 3
    assert "the server answered 503 Service Unavailable; asking again in 0.02 s, 1 times at most" in "".join(
        capsys.readouterr()
    )


@pytest.mark.parametrize(
    ("path", "limits", "told", "requests"),
    [
        ("broken", {"retries": 2}, r"after 3 requests \(--reward-retries\): the server answered 503", 3),
        ("gone", {"retries": 2}, "the server answered 404", 1),
        ("moved", {"retries": 2}, "the server answered 302", 1),
        ("slow", {"timeout_s": 0.3}, r"the server did not answer within 0.3 s", 1),
        ("short", {"retries": 2}, "returned 1 numbers for 2 texts", 1),
        ("silent", {"timeout_s": 0.2}, r"the server did not answer within 0.2 s \(--reward-timeout-s\)", 1),
    ],
)
def test_requests_are_repeated_where_that_may_help_alone(server, path, limits, told, requests):
    with pytest.raises(ConfigError, match=told):
        asked(f"{server.url}/{path}", **limits)
    assert server.paths == [f"/{path}"] * requests


def test_waits_double_up_to_a_minute_or_are_what_the_server_says():
    limits = ServerLimits()
    assert [limits.wait_s(attempt, None) for attempt in (0, 1, 2, 9)] == [1, 2, 4, 60]
    assert [limits.wait_s(0, asked) for asked in ("7", "900", "soon", "-1")] == [7, 60, 1, 1]


def test_a_server_that_is_not_there_is_named(server):
    with pytest.raises(ConfigError, match="cannot be reached"):
        asked("http://127.0.0.1:9/score")
    with pytest.raises(ConfigError, match="an address without a host"):
        load_reward("http:///score")


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://h:abc/", "http://h:99999/x", "http://h/a b", "http://h/\u00e4", "https://:80/x", "http://"],
)
def test_what_is_no_address_is_refused_before_anything_is_compiled(url):
    (told,) = (
        problem for problem in config(reward=(url, "http://127.0.0.1:9/a%20b?c=d")).problems() if "--reward" in problem
    )
    assert told.startswith((f"--reward {url}: ", f"--reward {url!r}: "))
    with pytest.raises(ConfigError) as error:
        load_reward(url)
    assert error.value.problems == [told]
