# SPDX-License-Identifier: Apache-2.0
"""Curricula: schedules as DeepSpeed writes them, draws against a brute-force sort, metrics against counting by hand."""

import math
from collections import Counter

import numpy as np
import pytest
from test_blend_and_loader import EOD, IGNORED, token_file

from sporeloom.core.errors import ConfigError
from sporeloom.data.curriculum import (
    Curriculum,
    CurriculumConfig,
    DifficultyIndex,
    ScheduleConfig,
    check_index,
    loss_by,
    read_curriculum,
    sample_lengths,
    vocabulary_rarity,
)
from sporeloom.data.loader import Dataset, Loader
from sporeloom.data.packing import BestFit, Stream, save_packing
from sporeloom.data.sample_order import Sizes, ramped_batch_sizes

SEQ_LEN = 16
SIZES = Sizes(ramped_batch_sizes(4, 4, 60, 12), (SEQ_LEN,))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("tokens") / "a", 1, num_tokens=3000)


def config(kind="fixed_linear", type_="percentile", low=10.0, high=100.0, **schedule):
    given = {"total_curriculum_step": 40, "difficulty_step": 10, **schedule}
    return CurriculumConfig("i.npz", kind, ScheduleConfig(**given), low, high, type_)


def loader(tokens, curriculum):
    dataset = Dataset("a", tokens, 1.0, tokens.places_of(IGNORED), Stream(tokens, SEQ_LEN))
    return Loader([dataset], SIZES, 5, EOD, IGNORED, curriculum=curriculum)


@pytest.mark.parametrize(("kind", "degree"), [("fixed_linear", 1), ("fixed_root", 2), ("fixed_root", 3)])
def test_schedules_are_deepspeeds(kind, degree):
    asked = config(kind, low=7.0, high=93.0, root_degree=degree, total_curriculum_step=100, difficulty_step=5)
    for step in range(1, 130):
        value = (float(step) / 100) ** (1.0 / degree)
        value = math.floor(value * (93 - 7) + 7)
        value -= value % 5
        assert asked.difficulty(step) == min(value, 93)


def test_a_discrete_schedule_has_a_difficulty_up_to_each_step():
    asked = config("fixed_discrete", difficulty=(10, 40, 100), max_step=(5, 9))
    assert [asked.difficulty(step) for step in (1, 5, 6, 9, 10, 99)] == [10, 10, 40, 40, 100, 100]


@pytest.mark.parametrize("kind", ["percentile", "value"])
def test_steps_draw_the_easiest_samples_and_each_once_an_epoch(tokens, kind):
    values = np.random.default_rng(1).integers(0, 100, tokens.num_samples(SEQ_LEN)).astype(float)  # with ties
    asked = config("fixed_root", kind, total_curriculum_step=30)
    curriculum = Curriculum(asked, DifficultyIndex("m", SEQ_LEN, "stream", "c", values), seed=3)
    whole, seen, pool = loader(tokens, curriculum), Counter(), None
    by_hand = sorted(range(len(values)), key=lambda sample: (values[sample], sample))
    pools = []
    for step in range(60):
        difficulty = asked.difficulty(step + 1)
        if kind == "percentile":
            easiest = by_hand[: int(len(values) * difficulty / 100)]
        else:
            easiest = [sample for sample in by_hand if values[sample] <= difficulty]
        if pool != len(easiest):
            seen, pool = Counter(), len(easiest)
            pools.append(pool)
        samples = whole.drawn(step).samples
        assert len(samples) == SIZES.of_step(step)[0]
        assert set(samples) <= set(easiest)
        seen.update(samples.tolist())
        counts = [seen[sample] for sample in easiest]
        assert max(counts) - min(counts) <= 1  # epoch after epoch
    assert pools == sorted(pools)
    assert len(pools) > 4
    assert pools[-1] == len(values)
    fresh = loader(tokens, curriculum)
    for step in (41, 7, 55, 0):  # wherever a run resumes
        assert fresh.drawn(step).samples.tolist() == whole.drawn(step).samples.tolist()


def test_rarity_is_that_of_the_tokens_counts(tokens):
    rarity = vocabulary_rarity(tokens, Stream(tokens, SEQ_LEN))
    counts = Counter(tokens.tokens.tolist())
    for sample in (0, 7, len(rarity) - 1):
        ids = tokens.tokens[sample * SEQ_LEN : (sample + 1) * SEQ_LEN + 1].tolist()
        expected = -sum(math.log(counts[i] / len(tokens.tokens)) for i in ids)
        assert rarity[sample] == pytest.approx(expected, rel=1e-12)


def test_lengths_and_losses_leave_padding_out(tokens, tmp_path):
    save_packing(tokens, SEQ_LEN, tmp_path / "p.npz")
    packed = BestFit(tokens, SEQ_LEN, tmp_path / "p.npz")
    lengths = sample_lengths(packed)
    assert lengths.sum() == sum(stop - start for i in range(packed.num_samples) for start, stop in packed.pieces(0, i))
    assert lengths.min() < SEQ_LEN + 1 == lengths.max()
    found = loss_by(
        tokens, packed, SEQ_LEN, IGNORED, lambda ids: ids[:, 1:].astype(float)
    )  # the loss of an id is the id
    for sample in (0, 11, packed.num_samples - 1):
        ids = np.concatenate([tokens.tokens[start:stop] for start, stop in packed.pieces(0, sample)])
        assert found[sample] == pytest.approx(ids[1:][ids[:-1] != IGNORED].mean())


def test_an_index_is_read_as_it_was_written_and_held_against_the_run(tokens, tmp_path):
    index = DifficultyIndex("vocabularyrarity", SEQ_LEN, "stream", "content 1", np.arange(9.0))
    index.save(tmp_path / "i.npz")
    found = check_index(tmp_path / "c.yaml", tmp_path / "i.npz", SEQ_LEN, "stream", "content 1")
    assert (found.metric, found.values.tolist()) == ("vocabularyrarity", list(range(9)))
    with pytest.raises(ConfigError) as told:
        check_index(tmp_path / "c.yaml", tmp_path / "i.npz", 32, "best-fit", "content 2")
    assert len(told.value.problems) == 3
    assert "is of seq len 16, the run's is 32" in told.value.problems[0]
    (tmp_path / "i.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="not what sporeloom preprocess difficulty writes"):
        DifficultyIndex.read(tmp_path / "i.npz")
    with pytest.raises(ConfigError, match="there is no such file"):
        DifficultyIndex.read(tmp_path / "j.npz")


def test_a_file_is_read(write):
    path = write(
        "c.yaml",
        "index: i.npz\nmin_difficulty: 5\nschedule_type: fixed_root\n"
        "schedule_config: {total_curriculum_step: 100, difficulty_step: 5, root_degree: 3}\n",
    )
    found = read_curriculum(path)
    assert (found.difficulty_type, found.min_difficulty, found.max_difficulty) == ("percentile", 5, 100)
    assert found.schedule_config == ScheduleConfig(100, 5, 3)


HEAD = "index: i.npz\nschedule_type: "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + "fixed_linear\n", "schedule_config missing"),
        (HEAD + "linear\nschedule_config: {}\n", "schedule_type"),
        (HEAD + "fixed_linear\nschedule_config: {total_step: 5}\n", "total_step"),
        (HEAD + "fixed_discrete\nschedule_config: {difficulty: [1, 2], max_step: [1, 2]}\n", "one entry less"),
        (HEAD + "fixed_discrete\nschedule_config: {difficulty: [5, 2], max_step: [1]}\n", "must not fall"),
        (HEAD + "fixed_linear\nmin_difficulty: 50\nmax_difficulty: 20\nschedule_config: {}\n", "above max_difficulty"),
        (HEAD + "fixed_linear\nmax_difficulty: 200\nschedule_config: {}\n", "at most 100"),
    ],
)
def test_mistakes_in_a_file_are_told(write, text, told):
    with pytest.raises(ConfigError, match=told):
        read_curriculum(write("c.yaml", text))


def test_a_first_difficulty_without_samples_is_told():
    index = DifficultyIndex("m", SEQ_LEN, "stream", "c", np.arange(50.0, 60.0))
    assert list(Curriculum(config(type_="value"), index, 1).problems()) == [
        "i.npz: no sample is within the first difficulty, 10; raise min_difficulty"
    ]
