# SPDX-License-Identifier: Apache-2.0
import json
from random import Random

import numpy as np
import pytest
from conftest import shared

from pangu.config import LEARNING_RATES, SIZES
from pangu.tokenizer import SPECIAL, PanGuTokenizer, cut, train_tokenizer
from pangu.weights import TABLES
from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import num_parameters, parameter_shapes
from sporeloom.models.weight_names import names

PUBLISHED = {"350m": 345_368_576, "2.6b": 2_625_295_360, "13b": 12_800_870_400, "200b": 206_861_008_896}


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameter_counts_are_the_published_ones(size):
    assert num_parameters(SIZES[size]) == PUBLISHED[size]
    assert sum(int(np.prod(shape)) for shape in parameter_shapes(SIZES[size]).values()) == PUBLISHED[size]


def test_every_size_has_a_learning_rate():
    assert LEARNING_RATES.keys() == SIZES.keys()


def test_only_the_transposed_matrices_of_mindspore_are_marked():
    marked = {ours for ours, other in TABLES["mindspore"].items() if other.transposed}
    leaves = {"attention.output.weight", "mlp.up.weight", "mlp.down.weight"}
    assert marked == {f"{layer}.{leaf}" for layer in ("layers.{i}", "query_layer") for leaf in leaves}
    assert not any(other.transposed for other in TABLES["megatron"].values())


def test_names_count_the_query_layer():
    assert len(names(TABLES["megatron"], 4)) == 5 + 16 * 4
    assert names(TABLES["mindspore"], 4)["layers.2.mlp.up.bias"].name == "backbone.blocks.2.output.mapping.bias"


def test_the_tokenizer_gives_the_originals_ids():
    tokenizer = PanGuTokenizer(shared("golden/pangu_vocab.model"))
    cases = json.loads(shared("golden/tokenizer_pangu.json").read_text(encoding="utf-8"))["cases"]
    assert cases
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["name"]
        assert tokenizer.decode(case["ids"]) == case["decoded"], case["name"]


def test_words_are_those_of_jieba():
    jieba = pytest.importorskip("jieba")
    random, words = Random(1), [line.split(" ")[0] for line in jieba.get_dict_file().read().decode().splitlines()]
    kinds = [
        lambda: random.choice(words),
        lambda: chr(random.randrange(0x4E00, 0x9FD6)),
        lambda: random.choice("abcXYZ019 \n\t\r\uff0c\u3002Tt15\u2582\u2583"),
        lambda: chr(random.randrange(1, 0x3000)),
        lambda: str(random.random())[2:6],
        lambda: "\r\n",
    ]
    rare = [
        lambda: chr(random.randrange(0x3400, 0xD7FF)),
        lambda: chr(random.randrange(0xE000, 0x30000)),
        lambda: random.choice("+#&._%-"),
        lambda: str(random.random())[:6],
    ]
    for number in range(6000):
        chosen = kinds + rare * (number % 2)
        text = "".join(random.choice(chosen)() for _ in range(random.randrange(1, 40)))
        assert cut(text) == list(jieba.cut(text, cut_all=False)), text


def test_a_trained_tokenizer_has_the_released_special_ids(write):
    texts = ["明月几时有，把酒问青天。\n不知天上宫阙", "小城在山脚下，一条河从城中穿过。 春天 来了"] * 20
    tokenizer = PanGuTokenizer(write("t.model", train_tokenizer(texts, 100)))
    assert [tokenizer.pieces.id_to_piece(i) for i in range(10)] == list(SPECIAL)
    assert tokenizer.vocab_size <= 100
    assert tokenizer.decode(tokenizer.encode("明月 青天\n小城")) == "明月 青天\n小城"


def test_a_vocabulary_smaller_than_the_text_leaves_rare_characters_out(write):
    texts = ["".join(chr(0x4E00 + i) for i in range(300)), "天地天地天地天地"]
    tokenizer = PanGuTokenizer(write("t.model", train_tokenizer(texts, 64)))
    assert tokenizer.vocab_size <= 64
    assert tokenizer.decode(tokenizer.encode("天地")) == "天地"


def test_a_trained_tokenizer_knows_every_character(write):
    path = write("t.model", train_tokenizer(["小城在山脚下，一条河从城中穿过。"] * 5, 600))
    for text in ("小镇的早晨", "鑫龘", "émile", "🙂 и"):
        assert PanGuTokenizer(path).decode(PanGuTokenizer(path).encode(text)) == text


def test_a_tokenizer_learns_from_a_long_line(write):
    """SentencePiece would pass it over: it has 9000 bytes."""
    text = "the quick brown fox jumps over the lazy dog. " * 200
    tokenizer = PanGuTokenizer(write("m.model", train_tokenizer([text], 600)))
    assert tokenizer.decode(tokenizer.encode("a lazy fox")) == "a lazy fox"


def test_a_tokenizer_file_that_is_none_is_named(write, tmp_path):
    with pytest.raises(ConfigError, match="not a SentencePiece model"):
        PanGuTokenizer(write("t.model", b"nothing"))
    with pytest.raises(ConfigError, match="no such tokenizer"):
        PanGuTokenizer(tmp_path / "absent.model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "hidden_size 64 is not divisible by num_heads 5"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\)"),
        ({"eod_id": 300}, "outside the vocabulary"),
        ({"activation": "swish"}, "activation must be one of gelu, gelu_tanh, fast_gelu"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{"vocab_size": 128, "hidden_size": 64, "num_layers": 2, "num_heads": 4, **change})
