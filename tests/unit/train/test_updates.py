# SPDX-License-Identifier: Apache-2.0
"""Steps that update nothing are none of the optimizer's, nor of the learning rate's."""

import contextlib
import dataclasses
import math
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from sporeloom.core.errors import ConfigError
from sporeloom.data.sample_order import Sizes
from sporeloom.train import state, trainer
from sporeloom.train.adafactor import Adafactor
from sporeloom.train.loss_scale import LossScale
from sporeloom.train.optim import AdamW
from sporeloom.train.run_summary import RunTimes
from sporeloom.train.schedules import learning_rate
from sporeloom.train.spikes import SpikeGuard

HIGH, LOW, WARMUP, DECAY = 1.0, 0.1, 4, 20


def wanted_rate(update):
    """The documented schedule, of a cosine."""
    if update < WARMUP:
        return HIGH * update / WARMUP
    return LOW + 0.5 * (HIGH - LOW) * (1 + math.cos(math.pi * min(update, DECAY) / DECAY))


@dataclasses.dataclass
class Recorder:
    """An optimizer that notes what it is told."""

    told: list = dataclasses.field(default_factory=list)

    def prepare(self, update, learning_rate):
        self.told.append((update, learning_rate))


def training_of(norms, monkeypatch, skip_steps=(), scaled=True, optimizer=None):
    """A run whose steps' gradients have these norms."""
    monkeypatch.setattr(trainer, "compile_for", lambda *_: None)
    given, optimizer = iter(norms), optimizer or Recorder()
    config = SimpleNamespace(
        steps=len(norms) + len(skip_steps), stop_after=0, rerun_every=0, skip_steps=skip_steps, max_skipped_steps=0
    )
    return SimpleNamespace(
        run=SimpleNamespace(
            config=config,
            rate_of=lambda update: learning_rate(update, HIGH, LOW, WARMUP, DECAY),
            sizes=Sizes((1,), (1,)),
            strategy=SimpleNamespace(mesh=SimpleNamespace(first_rank_of_last_stage=0)),
        ),
        engine=SimpleNamespace(
            run=lambda *_: (Tensor([2.0]), Tensor([next(given)])),
            backend=SimpleNamespace(
                announce_step=lambda _: None, begin_step=lambda _: None, seconds_of_communication=lambda: None
            ),
            broadcast_value=lambda value, _: value,
        ),
        task=SimpleNamespace(metrics=lambda *_: {}),
        step=SimpleNamespace(loss_scale=Parameter(Tensor(1.0, ms.float32), name="scale")),
        optimizer=optimizer,
        prepare=optimizer.prepare,
        batch=lambda _: [],
        loss_scale=LossScale(2.0**32) if scaled else None,
        guard=None,
        validation=None,
        samples=None,
        evaluations=None,
        profile=None,
        audit=None,
        measured=None,
        updates=0,
        times=RunTimes(),
        utilization=SimpleNamespace(of_step=lambda *_: None, rates=lambda *_: {}),
    )


SAVER = SimpleNamespace(saving_after_an_error=lambda _: contextlib.nullcontext(), after_step=lambda _: False)
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("norms", "updates"),
    [
        ([1, 1, 1], [1, 2, 3]),
        ([INF, INF, INF, 1, 1], [1, 1, 1, 1, 2]),  # a loss scale that is found
        ([1, NAN, 1, INF, 1], [1, 2, 2, 3, 3]),
        ([INF] * 16 + [1, 1, 1, 1, 1], [1] * 17 + [2, 3, 4, 5]),
    ],
)
def test_an_overflow_is_no_update(monkeypatch, norms, updates):
    training = training_of(norms, monkeypatch)
    trainer.run_steps(training, None, SAVER, 0)
    assert [update for update, _ in training.optimizer.told] == updates
    assert [rate for _, rate in training.optimizer.told] == pytest.approx([wanted_rate(update) for update in updates])
    assert training.updates == sum(map(math.isfinite, norms))


@pytest.mark.parametrize(
    ("skipped", "count"), [(("1",), 3), (("2-4",), 4), (("1-2", "4"), 5), (("3", "5-7"), 4)], ids=str
)
def test_a_step_that_is_skipped_is_no_update(monkeypatch, skipped, count):
    left_out = sum(len(steps) for steps in trainer.parse_steps(skipped))
    training = training_of([1.0] * count, monkeypatch, scaled=False)
    training.run.config.steps, training.run.config.skip_steps = count + left_out, skipped
    _, _, last = trainer.run_steps(training, None, SAVER, 0)
    assert [update for update, _ in training.optimizer.told] == [*range(1, count + 1)]
    assert last.step == count + left_out and last.learning_rate == pytest.approx(wanted_rate(count))


def test_steps_before_a_spike_count_and_the_spike_does_not_once_the_run_is_back(monkeypatch):
    training = training_of([1.0, 1.0, NAN, 1.0], monkeypatch, scaled=False)
    training.guard = SpikeGuard(2.0, window=8)
    monkeypatch.setattr(trainer, "rewind", lambda training, *_: setattr(training, "updates", 1))  # saved after step 1
    trainer.run_steps(training, None, SAVER, 0)
    assert [update for update, _ in training.optimizer.told] == [1, 2, 3, 2]


@pytest.mark.parametrize(
    ("saved", "updates"), [({"updates": 3}, 3), ({"updates": 0}, 0), ({}, 20)], ids=["some", "none", "earlier release"]
)
def test_a_resumed_run_counts_on(monkeypatch, saved, updates):
    monkeypatch.setattr(state, "load_state", lambda *_: None)
    training = training_of([1.0], monkeypatch)
    training.report, training.task.restore = None, lambda _: None
    state._take_up(
        training, None, SimpleNamespace(step=20, state={"loss_scale": {"value": 8, "fine_steps": 1}, **saved})
    )
    assert training.updates == updates and training.loss_scale.value == 8


@pytest.mark.parametrize("num_skipped", [0, 4])
def test_the_first_update_of_adam_is_as_long_as_the_rate(monkeypatch, num_skipped):
    """m / (1 - beta1) is g and v / (1 - beta2) g^2, so it is rate * sign(g), as with torch's scaler. Were 4 skipped steps
    counted, it would be 0.55 of that."""
    ms.set_context(mode=ms.GRAPH_MODE)
    weight = Parameter(Tensor(np.zeros(2, np.float32)), name="w")
    optimizer = AdamW([weight], beta2=0.999, weight_decay=0.0, bias_correction=True)
    training = training_of([INF] * num_skipped + [1.0], monkeypatch, optimizer=optimizer)
    run, gradient = training.engine.run, np.array([0.5, -3.0], np.float32)

    def step(*_):
        loss, norm = run()
        is_over = not np.isfinite(norm.asnumpy()).all()
        optimizer((Tensor(0 * gradient if is_over else gradient),), Tensor(is_over))
        return loss, norm

    training.engine.run = step
    _, _, last = trainer.run_steps(training, None, SAVER, 0)
    np.testing.assert_allclose(weight.asnumpy(), -wanted_rate(1) * np.sign(gradient), rtol=1e-5)
    assert last.learning_rate == wanted_rate(1)


def test_adafactor_takes_its_decay_from_the_update():
    optimizer = Adafactor([Parameter(Tensor(np.ones(2, np.float32)), name="w")])
    for update in (1, 2, 40):
        optimizer.prepare(update, 0.1)
        assert float(optimizer.beta2.asnumpy()) == pytest.approx(1 - update**-0.8, abs=1e-7)


def saver_after_errors(saved):
    """A saver that notes in `saved` the steps that it saves after an error."""

    @contextlib.contextmanager
    def saving(step):
        try:
            yield
        except ConfigError:
            saved.append(step)
            raise

    return SimpleNamespace(**{**vars(SAVER), "saving_after_an_error": saving})


def test_a_step_whose_evaluation_fails_is_written_and_saved(monkeypatch):
    def fail():
        raise ConfigError("the benchmark cannot be read")

    written, saved = [], []
    training = training_of([1.0, 1.0, 1.0], monkeypatch, scaled=False)
    training.evaluations = SimpleNamespace(is_due=lambda step, _: step == 2, metrics=fail)
    saver = saver_after_errors(saved)
    with pytest.raises(ConfigError, match="cannot be read"):
        trainer.run_steps(training, SimpleNamespace(write=lambda metrics: written.append(metrics.step)), saver, 0)
    assert (written, saved) == ([1, 2], [2])


@pytest.mark.parametrize("has_data_ids", [True, False])
def test_a_predicted_step_is_compared_without_sampling(monkeypatch, has_data_ids):
    training, seen = training_of([1.0, 1.0], monkeypatch), []
    training.run.config.has_data_ids = has_data_ids
    training.times = SimpleNamespace(
        **{name: getattr(training.times, name) for name in ("seconds", "measure", "measure_step")}
    )
    training.times.add_step, training.times.since = lambda *_: None, lambda _: {"data_s": 1000.0}
    training.measured = SimpleNamespace(prediction=SimpleNamespace(step_time_s=1.0), add=seen.append)
    trainer.run_steps(training, None, SAVER, 0)
    assert len(seen) == 2 and all((seconds > 0) == has_data_ids for seconds in seen)
