# SPDX-License-Identifier: Apache-2.0
"""Decoding with a KV cache gives what the whole model gives, and what the original implementations gave."""

import dataclasses
import json
import shutil

import mindspore as ms
import numpy as np
import pytest
from conftest import shared, tool
from mindspore.graph.api import _cell_graph_executor

from sporeloom.checkpoint.model_folder import load_config, save_checkpoint
from sporeloom.inference.decoding import CachedDecoder
from sporeloom.inference.mixed import RaggedDecoder
from sporeloom.inference.model import load_model
from sporeloom.inference.requests import Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import generate
from sporeloom.inference.uncached import UncachedDecoder
from sporeloom.models.family import family_module, size_config
from sporeloom.models.weight_formats import WEIGHT_FORMATS
from sporeloom.nn.linear import MAX_KERNEL_ROWS
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE

pytestmark = pytest.mark.slow

GOLDEN_ACTIVATIONS = {"gelu": "", "gelu_tanh": "_act_tanh", "fast_gelu": "_act_fast"}


@pytest.fixture(scope="module")
def engine():
    ms.set_device("CPU")
    return Engine.start(SINGLE_DEVICE)


@pytest.fixture(scope="module")
def golden():
    archive = np.load(shared("golden/pangu_case_a.npz"))
    return {name.removeprefix("golden."): archive[name] for name in archive.files}


def saved(folder, family, config):
    """A model whose next tokens are far from each other."""
    ms.set_seed(3)
    net = family_module(family, "model").Model(config)
    noise = np.random.RandomState(3)
    weights = {p.name: p.asnumpy() + noise.normal(0, 0.1, p.shape).astype(np.float32) for p in net.get_parameters()}
    save_checkpoint(folder, weights, family, config)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = dataclasses.replace(size_config("pangu", "tiny"), seq_len=96, dropout_rate=0.0)
    return saved(tmp_path_factory.mktemp("tiny") / "checkpoint", "pangu", config)


def converted(folder, activation, family="pangu"):
    config = folder / "config_in.json"
    config.write_text(json.dumps({"num_heads": 4, "activation": activation, "eod_id": 9}))
    outcome = tool(
        *("tools/convert_checkpoint.py", "--model", family, "--from", "megatron", "--to", "ours"),
        *("--config", config, shared(f"golden/{family}_case_a.npz"), folder / "checkpoint"),
    )
    assert outcome.code == 0, outcome.output
    return folder / "checkpoint"


def cached(engine, folder, num_rows=1, num_slots=64, weights="float32", chunk=64):
    family, config = load_config(folder)
    net = load_model(folder, family, config, SINGLE_DEVICE, (num_rows, num_slots), weights)
    return CachedDecoder(engine, net, config, num_rows, num_slots, chunk)


def recomputed(engine, folder, num_rows=1, weights="float32"):
    family, config = load_config(folder)
    net = load_model(folder, family, config, SINGLE_DEVICE, weights=weights)
    return UncachedDecoder(engine, net, config, num_rows)


def extend(decoding, ids):
    """Logits after the last of some further tokens of row 0."""
    while ids:
        chunk = decoding.next_chunks({0: ids}, 0)[0]
        logits, ids = decoding.step({0: chunk}, {})[0], ids[len(chunk) :]
    return logits


def tokens_of(decoding, engine, prompts, max_new_tokens, sampling=None):
    sampler = Sampler(sampling or SamplingConfig())
    requests = [Request(prompt, max_new_tokens, sampler, lambda tokens: False, i) for i, prompt in enumerate(prompts)]
    result = [[] for _ in prompts]
    for new in generate(decoding, engine, requests):
        result[new.request].append(new.token)
    return result


@pytest.mark.parametrize("activation", GOLDEN_ACTIVATIONS)
def test_the_greedy_continuation_is_the_originals(tmp_path, golden, engine, activation):
    suffix, prompt = GOLDEN_ACTIVATIONS[activation], golden["prompt"].tolist()
    folder = converted(tmp_path, activation)
    expected = golden["greedy_tokens" + suffix].tolist()
    steps, decoding = [], cached(engine, folder)
    assert tokens_of(decoding, engine, [prompt], 12) == [expected]
    assert tokens_of(recomputed(engine, folder), engine, [prompt], 12) == [expected]
    decoding.clear(0)
    for feed in [prompt, *([token] for token in expected[:-1])]:
        steps.append(extend(decoding, feed))
    np.testing.assert_allclose(steps, golden["greedy_step_logits" + suffix], rtol=0, atol=1e-4)


def test_codegeex_continues_as_the_original_did(tmp_path, engine):
    golden = np.load(shared("golden/codegeex_case_a.npz"))
    folder, prompt = converted(tmp_path, "fast_gelu", "codegeex"), golden["golden.prompt"].tolist()
    expected = golden["golden.greedy_tokens"].tolist()
    assert tokens_of(cached(engine, folder), engine, [prompt], len(expected)) == [expected]


def test_at_every_position_cached_logits_are_the_recomputed_ones(engine, golden, tmp_path):
    folder = converted(tmp_path, "gelu")
    ids = golden["input_ids"][0].tolist()
    one_by_one = cached(engine, folder)
    logits = np.stack([extend(one_by_one, [token]) for token in ids])
    np.testing.assert_allclose(logits, golden["logits"][0], rtol=0, atol=1e-4)


def test_a_prompt_of_several_chunks_gives_what_one_forward_gives(engine, tiny):
    ids = np.random.RandomState(0).randint(0, 2000, 90).tolist()
    in_chunks, whole = cached(engine, tiny, num_slots=128, chunk=16), recomputed(engine, tiny)
    np.testing.assert_allclose(extend(in_chunks, ids[:70]), extend(whole, ids[:70]), rtol=0, atol=1e-4)
    np.testing.assert_allclose(extend(in_chunks, ids[70:]), extend(whole, ids[70:]), rtol=0, atol=1e-4)


def test_trimmed_tokens_leave_no_trace(engine, tiny):
    decoding = cached(engine, tiny)
    first = extend(decoding, [5, 6, 7])
    extend(decoding, [8, 9])
    decoding.trim(0, 2)
    np.testing.assert_array_equal(extend(decoding, [7]).argmax(), first.argmax())
    decoding.trim(0, 0)
    np.testing.assert_array_equal(extend(decoding, [5, 6, 7]), first)


def test_a_row_gets_in_a_mixed_batch_what_it_gets_alone(engine, tiny):
    draw = np.random.RandomState(1)
    prompts = [draw.randint(0, 2000, length).tolist() for length in (3, 40, 1, 17, 9)]
    together = cached(engine, tiny, num_rows=3)  # five prompts share three rows
    alone, again = cached(engine, tiny), recomputed(engine, tiny, num_rows=2)
    for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0, top_p=0.9, seed=4)):
        result = tokens_of(together, engine, prompts, 12, sampling)
        if sampling.temperature == 0:  # alone, every prompt is the first one and draws the first one's numbers
            assert result == [tokens_of(alone, engine, [prompt], 12)[0] for prompt in prompts]
        assert result == tokens_of(again, engine, prompts, 12, sampling)
        assert len({tuple(tokens) for tokens in result}) == len(prompts)


class CountingCompiler:
    """MindSpore's graph executor, counting its compilations."""

    def __init__(self, executor):
        self.executor, self.compiled = executor, 0

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def __call__(self, *arguments):
        return self.executor(*arguments)

    def compile(self, *arguments):
        self.compiled += 1
        return self.executor.compile(*arguments)


def test_nothing_compiles_after_the_first_request_of_a_bucket(engine, tiny, monkeypatch):
    decoding = cached(engine, tiny)
    compiler = CountingCompiler(_cell_graph_executor._graph_executor)
    monkeypatch.setattr(_cell_graph_executor, "_graph_executor", compiler)
    tokens_of(decoding, engine, [[5] * 9], 4)
    assert compiler.compiled == 2  # a prefill of 16 and a decode of 1
    tokens_of(decoding, engine, [[6] * 3, [7] * 16, [8] * 14, [9]], 4)
    decoding.prepare([2, 13], 30)
    assert compiler.compiled == 2
    tokens_of(decoding, engine, [[5] * 17], 4)
    assert compiler.compiled == 3


def test_int8_takes_a_quarter_and_points_the_same_way(engine, tmp_path, tiny):
    experts = saved(tmp_path / "experts", "pangu", size_config("pangu", "gshard_tiny"))
    ids = list(range(10, 26))
    for folder in (tiny, experts):
        exact, coarse = recomputed(engine, folder), recomputed(engine, folder, weights="int8")
        for length in (1, 8, len(ids)):
            a, b = (extend(d, ids[:length]).astype(np.float64) for d in (exact, coarse))
            assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) >= 0.999
            exact.trim(0, 0)
            coarse.trim(0, 0)
        sizes = [sum(p.asnumpy().nbytes for p in d.net.get_parameters()) for d in (exact, coarse)]
        assert sizes[1] / sizes[0] < 0.3


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
@pytest.mark.parametrize("size", ["tiny", "codegeex4", "int8", "w8a8", "int4-asym-g32"])
def test_in_mixed_batches_a_row_gets_the_same_to_the_bit_whoever_is_beside_it(engine, tmp_path, tiny, size):
    """In one batch with others, or alone; its prompt at once, or token by token."""
    folder = (
        saved(tmp_path / "codegeex4", "codegeex", size_config("codegeex", "4_tiny")) if size == "codegeex4" else tiny
    )
    family, config = load_config(folder)
    shape = (5, 64)
    weights = size if size in WEIGHT_FORMATS else "float32"
    net = load_model(folder, family, config, SINGLE_DEVICE, shape, weights)
    decoding = RaggedDecoder(engine, net, config, *shape, 6)
    assert decoding.sizes == [1, 4, 5, 10, MAX_KERNEL_ROWS]
    waiting = {0: [1] * 4, 3: [2] * MAX_KERNEL_ROWS}
    assert decoding.next_chunks(waiting, 1) == {0: [1] * 4, 3: [2] * 2}  # beside tokens of others
    assert decoding.next_chunks(waiting, 0) == {0: [1] * 4, 3: [2] * (MAX_KERNEL_ROWS - 4)}
    short = {0: [1] * 4, 2: [3] * 8, 3: [2] * MAX_KERNEL_ROWS}  # two end in the step
    assert decoding.next_chunks(short, 2) == {0: [1] * 4, 2: [3] * 2}
    assert decoding.next_chunks(short, 1) == {0: [1] * 4, 2: [3] * 8, 3: [2] * (MAX_KERNEL_ROWS - 13)}
    texts = {0: [3, 1, 4, 1, 5, 9, 2, 6], 3: [9, 2, 6], 4: [5, 3]}
    beside = {row: [] for row in texts}

    def note(step):
        for row, logits in step.items():
            beside[row] += list(logits) if logits.ndim == 2 else [logits]

    note(decoding.step({3: [9, 2, 6], 4: [5], 0: [3, 1]}, {}, every=True))
    note(decoding.step({0: [4, 1, 5, 9, 2, 6]}, {3: 7, 4: 3}, every=True))
    note(decoding.step({}, {0: 8, 3: 1, 4: 1}))
    texts = {0: [*texts[0], 8], 3: [*texts[3], 7, 1], 4: [*texts[4], 1]}
    for row, ids in texts.items():
        for other in (row, (row + 1) % 5):  # its own row of the caches, and another
            decoding.trim(other, 0)
            alone = [decoding.step({}, {other: token})[other] for token in ids]
            np.testing.assert_array_equal(alone, beside[row])
            decoding.trim(other, 0)
            np.testing.assert_array_equal(decoding.step({other: ids[:6]}, {}, every=True)[other], beside[row][:6])
    plain = CachedDecoder(engine, decoding.net, config, *shape)
    for row in range(5):
        plain.trim(row, 0)
    np.testing.assert_allclose(plain.step({2: texts[0]}, {}, every=True)[2], beside[0], rtol=0, atol=1e-5)
