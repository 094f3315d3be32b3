# SPDX-License-Identifier: Apache-2.0
"""What the evaluation harness is told, against sums over full recomputation: a made-up model says what follows any tokens."""

import base64
import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece

pytest.importorskip("lm_eval")
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from vocabularies import glm4_json

from codegeex.glm_tokenizer import GLM4Tokenizer
from pangu.open_tokenizer import OpenPanguTokenizer
from sporeloom.core.errors import ConfigError
from sporeloom.evaluation.harness import HarnessModel, rolling_windows
from sporeloom.evaluation.harness_config import as_json
from sporeloom.evaluation.harness_options import read_options
from sporeloom.evaluation.written_chats import WrittenChats
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.inference.session import Session, StopConditions
from sporeloom.strategy.config import SINGLE_DEVICE

ENGINE = SimpleNamespace(
    strategy=SINGLE_DEVICE,
    is_log_rank=True,
    in_last_stage=True,
    broadcast=lambda array, source: array,
    broadcast_value=lambda value, source: value,
)
CONTEXT = 12


class Plain:
    """A tokenizer without a prefix: a token a byte, and one that ends documents."""

    vocab_size, eod_id, file_name, prefix = 257, 256, "none", ()

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b""


def logits_after(tokens, size):
    return np.random.default_rng([len(tokens), *tokens]).normal(size=size).astype(np.float32)


class Decoding:
    """Rows of tokens, prompts in chunks of 5."""

    reusable, num_rows = 0, 2

    def __init__(self, size):
        self.size, self.rows = size, {row: [] for row in range(self.num_rows)}

    def prepare(self, lengths, most):
        pass

    def next_chunks(self, waiting, num_decoded):
        return {row: ids[:5] for row, ids in waiting.items()}

    def step(self, chunks, tokens, every=False, drafts=None):
        found = {}
        for row, ids in {**chunks, **{row: [token] for row, token in tokens.items()}}.items():
            logits = []
            for token in ids:
                self.rows[row].append(token)
                assert len(self.rows[row]) <= CONTEXT
                logits.append(logits_after(self.rows[row], self.size))
            found[row] = np.stack(logits) if every and row in chunks else logits[-1]
        return found

    def trim(self, row, length):
        del self.rows[row][length:]

    def clear(self, row):
        self.trim(row, 0)

    def use_adapter(self, row, adapter):
        pass


def openpangu(folder):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the fox jumps over the dog"] * 9), model_writer=model, model_type="bpe", vocab_size=400,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=[f"[unused{i}]" for i in range(12)],
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return OpenPanguTokenizer(folder / "tokenizer.model")


PREFIXES = {"none": (lambda folder: Plain(), 0), "[gMASK]<sop>": (glm4_json, 2), "BOS": (openpangu, 1)}


@pytest.fixture(scope="module", params=PREFIXES)
def model(request, tmp_path_factory):
    make, count = PREFIXES[request.param]
    made = model_with(make(tmp_path_factory.mktemp("tokenizer")))
    assert len(made.own_prefix) == count
    return made


def model_with(tokenizer, **config):
    model = HarnessModel.__new__(HarnessModel)
    model.engine, model.chats = ENGINE, WrittenChats(tokenizer)
    settings = SimpleNamespace(checkpoint="out/checkpoint", max_new_tokens=4, **config)
    model.job = SimpleNamespace(
        tokenizer=tokenizer, stop_ids=[tokenizer.eod_id], config=settings, model=SimpleNamespace(seq_len=CONTEXT)
    )
    model.stop = StopConditions(tokenizer, model.job.stop_ids)
    model.session = Session(ENGINE, Decoding(tokenizer.vocab_size), model.stop)
    return model


def asked(*arguments):
    return SimpleNamespace(args=arguments)


def log_probability(model, before, tokens):
    """Of `tokens` after `before`, each from all that the model can read before it; and whether all are the likeliest."""
    total, greedy = 0.0, True
    for place, token in enumerate(tokens):
        read = [*before, *tokens[:place]]
        logits = logits_after(read, model.job.tokenizer.vocab_size).astype(np.float64)
        total += logits[token] - math.log(np.exp(logits).sum())
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


def own(model, text):
    """Tokens of a text without the tokenizer's prefix."""
    return model.job.tokenizer.encode(text)[len(model.own_prefix) :]


def begin(model):
    """What a text is read after."""
    return model.own_prefix or [model.job.tokenizer.eod_id]


TEXTS = ["the", "fox", "the fox jumps", "é小", "the dog " * 5, "x" * 40]


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("the", " fox"), ("the ", "fox"), ("a", "b"), ("é", "小"), ("x y", " z "), ("", "the fox"), ("", "x"), ("", "é")],
)
def test_a_continuation_is_its_tokens_and_no_others(model, context, continuation):
    whole = own(model, context + continuation)
    count = len(own(model, context.rstrip()))
    before, tokens = (
        [*begin(model), *whole[:count]] if model.own_prefix or not context else whole[:count],
        whole[count:],
    )
    expected = log_probability(model, before, tokens)
    (found,) = model.loglikelihood([asked(context, continuation)])
    assert found == (pytest.approx(expected[0], abs=1e-5), expected[1])


@pytest.mark.parametrize(("context", "continuation"), [("x", ""), ("", ""), ("the fox", ""), ("x ", "")])
def test_an_empty_continuation_is_certain(model, context, continuation):
    found = model.loglikelihood([asked("the", " fox"), asked(context, continuation), asked("a", "b")])
    if context == "x " and own(model, "x ") != own(model, "x"):  # the harness gives the space to the continuation
        assert found[1][0] == pytest.approx(
            log_probability(model, [*model.own_prefix, *own(model, "x")], own(model, " "))[0]
        )
    else:
        assert found[1] == (0.0, True)
    assert all(total < 0 for total, _ in (found[0], found[2]))


def test_a_greedy_continuation_is_known(model):
    tokenizer = model.job.tokenizer
    tokens = [*begin(model), *own(model, "the")]
    best = [int(logits_after(tokens, tokenizer.vocab_size).argmax())]
    best.append(int(logits_after([*tokens, *best], tokenizer.vocab_size).argmax()))
    ((total, greedy), (_, other)) = model.scored([(tokens, best), (tokens, [best[0], (best[1] + 1) % 256])])
    assert greedy and not other and total == pytest.approx(log_probability(model, tokens, best)[0], abs=1e-5)


@pytest.mark.parametrize("count", range(1, 30))
def test_a_long_context_keeps_its_end(model, count):
    context, continuation = [5 + i for i in range(count)], [90, 91]
    read = [*context, *continuation][-(CONTEXT + 1) :][:-2]
    expected = log_probability(model, read, continuation)[0]
    assert model.scored([(context, continuation)])[0][0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("text", ["", *TEXTS])
def test_rolling_scores_each_token_of_the_text_once_and_no_prefix(model, text):
    tokens, total, start = own(model, text), 0.0, 0
    windows = list(rolling_windows(tokens, begin(model), CONTEXT))
    for number, (context, continuation) in enumerate(windows):
        assert continuation == tokens[start : start + len(continuation)]  # in order, none twice, none left out
        if number == 0:
            assert context == begin(model)
        else:
            assert context and context == tokens[start - len(context) : start]
            assert len(context) + len(continuation) == min(CONTEXT + 1, start + len(continuation))
        assert len(context) + len(continuation) <= CONTEXT + 1
        total += log_probability(model, context, continuation)[0]
        start += len(continuation)
    assert start == len(tokens)
    assert model.loglikelihood_rolling([asked(text)]) == [pytest.approx(total, abs=1e-4)]
    if len(tokens) + len(begin(model)) <= CONTEXT + 1:
        assert total == pytest.approx(log_probability(model, begin(model), tokens)[0])


@pytest.mark.parametrize("length", [0, 1, 2, 11, 12, 13, 24, 25, 26, 40])
def test_with_a_prefix_of_one_token_windows_are_the_harnesss(length):
    tokens = list(range(100, 100 + length))
    theirs = [make_disjoint_window(each) for each in get_rolling_token_windows(tokens, 7, CONTEXT, 1)]
    assert list(rolling_windows(tokens, [7], CONTEXT)) == theirs


def test_many_texts_at_once_get_what_each_gets_alone(model):
    together = model.loglikelihood_rolling([asked(text) for text in TEXTS])
    assert together == [model.loglikelihood_rolling([asked(text)])[0] for text in TEXTS]


def test_a_prefix_that_a_text_writes_out_is_not_doubled(tmp_path):
    model = model_with(glm4_json(tmp_path))
    assert model.tok_encode("[gMASK]<sop>x") == model.tok_encode("x") == [*model.own_prefix, ord("x")]
    assert model.loglikelihood([asked("", "[gMASK]<sop>x")]) == model.loglikelihood([asked("", "x")])
    assert model.prefix_token_id == model.own_prefix[-1]


def test_what_cannot_be_scored_is_refused(tmp_path):
    model = model_with(Plain())
    with pytest.raises(ConfigError, match=r"'b{13}'\.\.\.: 13 tokens to score; the model's context is 12"):
        model.loglikelihood([asked("a", "b" * 13)])
    lines = [base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join([*lines, base64.b64encode(b"ab") + b" 256\n"]))
    with pytest.raises(ConfigError, match=r"'b' after 'a': the tokenizer leaves no token of it"):
        model_with(GLM4Tokenizer(tmp_path / "tokenizer.model")).loglikelihood([asked("a", "b")])


def test_a_model_without_numbers_is_named(monkeypatch):
    model = model_with(Plain())
    monkeypatch.setattr("test_harness.logits_after", lambda tokens, size: np.full(size, np.nan, np.float32))
    with pytest.raises(ConfigError, match="out/checkpoint: the model's logits are NaN or infinite"):
        model.loglikelihood([asked("a", "b")])
    with pytest.raises(ConfigError, match="NaN or infinite"):
        model.generate_until([asked("a", {})])


SAMPLED = SamplingConfig(temperature=0.7)
OPTIONS = [
    ({}, SamplingConfig(), 4, ()),
    ({"until": None, "max_gen_toks": None, "temperature": None}, SamplingConfig(), 4, ()),
    ({"until": "\n"}, SamplingConfig(), 4, ("\n",)),
    ({"until": ["\n\n", "", "Q:"]}, SamplingConfig(), 4, ("\n\n", "Q:")),
    ({"max_gen_toks": 6}, SamplingConfig(), 6, ()),
    ({"max_new_tokens": 5}, SamplingConfig(), 5, ()),
    ({"max_tokens": 7, "max_completion_tokens": 7}, SamplingConfig(), 7, ()),
    ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, SamplingConfig(top_p=0.9), 4, ()),
    ({"do_sample": False, "temperature": 0.0}, SamplingConfig(), 4, ()),
    ({"temperature": 0}, SamplingConfig(), 4, ()),
    ({"temperature": 0.7}, SAMPLED, 4, ()),
    ({"do_sample": True, "temperature": 0.7}, SAMPLED, 4, ()),
    ({"do_sample": True, "temperature": 1, "top_k": 5}, SamplingConfig(temperature=1.0, top_k=5), 4, ()),
    ({"temperature": 0.7, "top_k": -1, "top_p": 1}, SAMPLED, 4, ()),
    (
        {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 3, "min_new_tokens": 2},
        SamplingConfig(temperature=0.7, top_p=0.95, repetition_penalty=1.1, seed=3, min_new_tokens=2),
        4,
        (),
    ),
    (
        {"frequency_penalty": 0.5, "presence_penalty": 1},
        SamplingConfig(frequency_penalty=0.5, presence_penalty=1),
        4,
        (),
    ),
    ({"num_beams": 1, "use_cache": True, "length_penalty": 1.0, "min_p": 0, "n": 1}, SamplingConfig(), 4, ()),
]


@pytest.mark.parametrize(("given", "sampling", "most", "until"), OPTIONS)
def test_every_option_of_a_task_is_done(given, sampling, most, until):
    found = read_options(given, model_with(Plain()).job)
    assert (found.sampling, found.max_new_tokens, found.until) == (sampling, most, until)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 4}, ["num_beams 4 is not supported"]),
        ({"bad_words_ids": [[1]]}, ["bad_words_ids is not supported"]),
        ({"tempreature": 0.5}, ["tempreature is not supported; did you mean temperature?"]),
        ({"max_length": 100}, ["max_length is not supported"]),
        ({"eos_token_id": 3}, ["eos_token_id is not supported"]),
        ({"min_p": 0.1, "typical_p": 0.5}, ["min_p 0.1 is not supported", "typical_p 0.5 is not supported"]),
        ({"n": 3, "length_penalty": 2}, ["n 3 is not supported", "length_penalty 2 is not supported"]),
        ({"do_sample": True}, ["do_sample needs a temperature above 0"]),
        ({"do_sample": True, "temperature": 0.0}, ["do_sample needs a temperature above 0"]),
        ({"do_sample": "yes"}, ["do_sample must be true or false, got 'yes'"]),
        ({"temperature": "hot", "top_k": 1.5}, ["temperature must be a number, got 'hot'", "top_k must be a number"]),
        ({"temperature": -1}, ["temperature must be at least 0"]),
        ({"top_p": 0}, [r"top_p must be in \(0, 1\]"]),
        ({"temperature": math.nan}, ["temperature must be a finite number"]),
        ({"until": [1]}, ["until must be a text or a list of texts"]),
        ({"max_gen_toks": 0}, ["max_gen_toks must be a whole number of at least 1, got 0"]),
        (
            {"max_new_tokens": 2, "max_gen_toks": 3},
            ["max_gen_toks and max_new_tokens are one option, but differ; keep one"],
        ),
        ({"max_gen_toks": 12}, ["max_gen_toks: a task needs answers of 12 tokens; the model's context is 12"]),
    ],
)
def test_what_is_not_done_is_refused_by_name(given, said):
    with pytest.raises(ConfigError) as raised:
        read_options(given, model_with(Plain()).job)
    assert len(raised.value.problems) == len(said)
    for each in said:
        assert raised.match(each)


def test_answers_are_what_the_options_say(model):
    """Of requests with different options, some alike: each from its own tokens, cut where a text ends it."""
    tokenizer, size = model.job.tokenizer, model.job.tokenizer.vocab_size

    def greedy(text, count):
        tokens, made = model.tok_encode(text) or begin(model), []
        for _ in range(count):
            made.append(int(logits_after([*tokens, *made], size).argmax()))
            if made[-1] == tokenizer.eod_id:
                return tokenizer.decode(made[:-1])
        return tokenizer.decode(made)

    long, short = greedy("the", 5), greedy("fox", 2)
    stop = long[1:2]
    requests = [
        asked("the", {"max_gen_toks": 5}),
        asked("fox", {"max_new_tokens": 2}),
        asked("the", {"max_gen_toks": 5, "until": [stop]}),
        asked("the", {"temperature": 1.0, "seed": 1}),
        asked("the", {"temperature": 1.0, "seed": 1}),
        asked("", {"max_gen_toks": 2}),
    ]
    found = model.generate_until(requests)
    assert found[:2] == [long, short] and found[2] == long.split(stop)[0] and found[5] == greedy("", 2)
    assert found[3] != found[4]  # repeats of a question are samples of their own
    assert model.generate_until(requests) == found
    assert model.session.stop is model.stop


def test_a_long_question_keeps_its_end_and_the_tokenizers_prefix(model):
    ids = list(model._fitting("the fox jumps over the dog" * 3, 4).tokens)
    count = len(model.own_prefix)
    assert ids[:count] == model.own_prefix and len(ids) == CONTEXT - 4
    assert ids[count:] == model.tok_encode("the fox jumps over the dog" * 3)[-(CONTEXT - 4 - count) :]


def test_results_are_json_whatever_they_are():
    text = as_json(
        {"town": {"ppl,none": math.inf, "acc,none": math.nan, "n": 1.5}}, {"town": [-math.inf]}, SimpleNamespace()
    )

    def refuse(constant):
        raise ValueError(constant)

    found = json.loads(text, parse_constant=refuse)
    assert found["results"]["town"] == {"ppl,none": None, "acc,none": None, "n": 1.5}
