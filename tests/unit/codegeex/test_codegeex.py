# SPDX-License-Identifier: Apache-2.0
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from conftest import shared

from codegeex.config import LEARNING_RATES, SIZES
from codegeex.languages import ALIASES, FUNCTION_ENDS, TAGS, tagged
from codegeex.tokenizer import CodeGeeXTokenizer, train_tokenizer
from codegeex.weights import TABLES
from sporeloom.core.errors import ConfigError
from sporeloom.models.parameters import num_parameters, parameter_shapes
from sporeloom.models.weight_names import names


@pytest.fixture(scope="module")
def released():
    return CodeGeeXTokenizer(shared("golden/codegeex_tokenizer"))


def test_the_parameter_count_is_the_published_one():
    assert num_parameters(SIZES["13b"]) == 12_873_943_040
    assert sum(int(np.prod(shape)) for shape in parameter_shapes(SIZES["13b"]).values()) == 12_873_943_040
    assert LEARNING_RATES.keys() == SIZES.keys()


def test_mindspore_keeps_both_embeddings_in_one_cell():
    table = names(TABLES["mindspore"], 40)
    assert table["embedding.word.weight"].name == "backbone.embedding.word_embedding.embedding_table"
    assert table["query_embedding.table.weight"].name == "backbone.top_query_embedding.embedding_table"
    assert table["layers.38.mlp.up.weight"] == ("backbone.blocks.38.output.mapping.weight", True)
    assert len(TABLES["megatron"]) == 5 + 2 * 16


def golden_cases():
    return json.loads(shared("golden/tokenizer_codegeex.json").read_text(encoding="utf-8"))["cases"]


def test_the_tokenizer_gives_the_originals_ids_and_texts(released):
    assert released.vocab_size == 50400
    assert released.eod_id == 50256
    for case in golden_cases():
        assert released.encode(case["text"]) == case["ids"], case["name"]
        assert released.decode(case["ids"]) == case["decoded_no_cleanup"], case["name"]
        assert released.decode(case["ids"], like_the_original=True) == case["decoded"], case["name"]


def test_names_of_special_tokens_are_text_when_they_are_not_parsed(released):
    text = "x<|extratoken_10|>y <|endoftext|>"
    assert released.decode(released.encode(text, parse_special=False)) == text
    assert released.encode(text)[1] == 50266
    assert released.encode(text)[-1] == 50256


def test_random_unicode_survives(released):
    draw = random.Random(0)
    alphabets = [
        lambda: chr(draw.randrange(32, 127)),
        lambda: draw.choice(" \t\n\r\x0b\u00a0\u2003\u3000"),
        lambda: chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])),
    ]
    for _ in range(100_000):
        text = "".join(draw.choice(alphabets)() for _ in range(draw.randrange(12)))
        assert released.decode(released.encode(text, parse_special=False)) == text


def test_pieces_are_those_of_the_tokenizers_library(released):
    draw = random.Random(1)
    for _ in range(5_000):
        text = "".join(draw.choice(" \t\nab1.é中'sll ") for _ in range(draw.randrange(40)))
        assert released.encode(text) == released._whole.encode(text).ids, repr(text)


@pytest.mark.slow
def test_the_standard_library_survives(released):
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    assert len(files) > 500
    for file in files:
        text = file.read_bytes().decode("utf-8", errors="replace")
        assert released.decode(released.encode(text, parse_special=False)) == text, file


def test_a_trained_tokenizer_ends_texts_with_token_0_and_comes_back_from_its_file(write, tmp_path):
    content = train_tokenizer([Path(json.__file__).read_text(encoding="utf-8")] * 3, 600)
    tokenizer = CodeGeeXTokenizer(write("tokenizer.json", content))
    assert tokenizer.eod_id == 0
    assert tokenizer.vocab_size <= 600
    text = "def f(x):\n        return x  # déjà vu\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path)
    assert CodeGeeXTokenizer(tmp_path).encode(text) == ids


@pytest.mark.slow
def test_hugging_faces_auto_tokenizer_opens_the_folder(released, tmp_path):
    transformers = pytest.importorskip("transformers")
    released.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for case in golden_cases():
        if "extratoken" not in case["text"]:  # their names are text there
            assert theirs(case["text"]).input_ids == case["ids"], case["name"]
        assert theirs.decode(case["ids"]) == case["decoded_no_cleanup"]
    assert theirs.eos_token_id == 50256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "not a CodeGeeX tokenizer"),
        (b"\xff", "not a CodeGeeX tokenizer"),
        (b"no json", "not a CodeGeeX tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(write, content, message):
    with pytest.raises(ConfigError, match=message):
        CodeGeeXTokenizer(write("tokenizer.json", content))


def test_a_folder_without_the_files_names_the_one_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab.json.gz: cannot be read: No such file"):
        CodeGeeXTokenizer(tmp_path)


def test_a_vocabulary_too_small_says_how_small_it_may_be():
    with pytest.raises(ConfigError, match="a vocabulary of 300 is too small for 400"):
        train_tokenizer(["a"], 300)


def test_a_prompt_is_put_under_its_languages_tag():
    assert tagged("def f():", "python") == "# language: Python\ndef f():"
    assert set(ALIASES.values()) <= set(TAGS)
    assert set(FUNCTION_ENDS) <= set(TAGS)
