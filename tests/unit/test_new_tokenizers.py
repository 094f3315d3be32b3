# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of openPangu, CodeGeeX2, CodeGeeX4 and PaLM, on vocabularies made here in the published formats."""

from unicodedata import normalize

import pytest
from vocabularies import TEXTS, TURNS, glm4_files, sentencepiece_model, write_config

from codegeex.glm_tokenizer import GLM2Tokenizer, GLM4Tokenizer
from codegeex.tokenizer import open_tokenizer as code_tokenizer
from palm.tokenizer import PaLMTokenizer
from palm.tokenizer import train_tokenizer as train_palm
from pangu.open_tokenizer import OpenPanguTokenizer
from pangu.tokenizer import PanGuTokenizer
from pangu.tokenizer import open_tokenizer as pangu_tokenizer
from pangu.tokenizer import train_tokenizer as train_pangu
from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import ChatMessage, chat_prompt, find_tokenizer, infill_prompt, special_token

TALK = [ChatMessage("user", "你好"), ChatMessage("assistant", "好"), ChatMessage("user", "fox")]


def test_openpangu_begins_with_bos_and_knows_its_turns(write):
    path = write("tokenizer.model", sentencepiece_model(user_defined_symbols=TURNS))
    tokenizer = pangu_tokenizer(path)
    assert isinstance(tokenizer, OpenPanguTokenizer)
    prompt, ids = chat_prompt(tokenizer, TALK)
    turns = ["系统：", "用户：你好", "助手：好", "用户：fox"]
    assert prompt == "".join(f"[unused9]{turn}[unused10]" for turn in turns) + "[unused9]助手："
    turn, end = (tokenizer.pieces.piece_to_id(name) for name in ("[unused9]", "[unused10]"))
    ids = list(ids)
    assert ids == tokenizer.encode(prompt)
    assert ids[:2] == [1, turn] and ids.count(turn) == 5 and ids.count(end) == ids.count(tokenizer.eod_id) == 4
    chunk = tokenizer.pieces.encode("用户：你好")
    assert any(ids[i : i + len(chunk)] == chunk for i in range(len(ids)))
    assert tokenizer.decode(tokenizer.encode("The lazy dog, 小城")) == "The lazy dog, 小城"
    quick, brown = tokenizer.encode("quick")[1:], tokenizer.encode("brown")[1:]
    assert (
        tokenizer.decode([1, *quick, *brown])
        == tokenizer.decode([1, *quick]) + tokenizer.decode(brown)
        == "quick brown"
    )
    with pytest.raises(ConfigError, match="--suffix: OpenPanguTokenizer"):
        infill_prompt(tokenizer, "a", "b")


def test_a_file_tells_which_pangu_it_is_for(write):
    assert isinstance(pangu_tokenizer(write("alpha.model", train_pangu(TEXTS, 600))), PanGuTokenizer)


def test_codegeex2_begins_with_gmask_and_sop(write):
    tokenizer = code_tokenizer(write("tokenizer.model", sentencepiece_model()))
    assert isinstance(tokenizer, GLM2Tokenizer)
    count = tokenizer.pieces.get_piece_size()
    ids = tokenizer.encode("# language: Python\n")
    assert ids[:2] == [count + 1, count + 3] and tokenizer.vocab_size == count + 5 and tokenizer.eod_id == 2
    assert tokenizer.encode("[MASK]")[2:] == [count]
    assert count not in tokenizer.encode_document("[MASK]")
    assert tokenizer.decode(tokenizer.encode("brown fox [MASK]")).strip() == "brown fox"
    assert chat_prompt(tokenizer, TALK).text == "[Round 1]\n\n问：你好\n\n答：好\n\n[Round 2]\n\n问：fox\n\n答："


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_codegeex4_reads_both_forms_of_its_vocabulary(tmp_path, name):
    glm4_files(tmp_path)
    tokenizer = code_tokenizer(tmp_path / name)
    assert isinstance(tokenizer, GLM4Tokenizer)
    special = {
        token: 260 + place for place, token in enumerate(["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>"])
    }
    assert tokenizer.encode("the return") == [special["[gMASK]"], special["<sop>"], 257, 32, 259, 117, 114, 110]
    assert tokenizer.eod_id == special["<|endoftext|>"]
    text = "return 小城\n\tthe <|user|>"
    assert tokenizer.decode(tokenizer.encode_document(text)) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text.removesuffix("<|user|>")
    assert chat_prompt(tokenizer, TALK[-1:]).text == "<|user|>\nfox<|assistant|>\n"
    assert infill_prompt(tokenizer, "a = ", "\nprint(a)").text.startswith(
        "<|user|>\n###MODE:BLOCK\n<|code_suffix|>\nprint(a)<|code_prefix|>a = "
    )
    assert special_token("codegeex", tmp_path / name, "<|user|>") == 267
    with pytest.raises(ConfigError, match=r"user is not one special token of 27\d other than the end of documents"):
        special_token("codegeex", tmp_path / name, "user")
    (tmp_path / "kept").mkdir()
    tokenizer.save(tmp_path / "kept")
    assert find_tokenizer("codegeex", tmp_path / "kept") == tmp_path / "kept" / name


def test_a_broken_vocabulary_is_named_with_its_line(write):
    path = write("tokenizer.model", b"YQ== 0\nYg== 1\n??? 2\n")
    with pytest.raises(ConfigError, match=r"tokenizer.model:3: not a line of a token in base64 and its rank"):
        code_tokenizer(path)
    with pytest.raises(ConfigError, match=r"ranks are not 0 .. 1, each once"):
        code_tokenizer(write("tokenizer.model", b"YQ== 0\nYg== 2\n"))


@pytest.mark.parametrize(
    "text", [" two  spaces ", "def f(x):\n\treturn x\r\n", "2024 年 12.5%", "🙂 é 龘", "\n\n", "a\u3000b"]
)
def test_palm_loses_nothing(write, text):
    tokenizer = PaLMTokenizer(write("tokenizer.model", train_palm(TEXTS, 600)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod_id == 1


@pytest.mark.parametrize(("train", "opened"), [(train_palm, PaLMTokenizer), (train_pangu, PanGuTokenizer)])
def test_more_characters_than_pieces_go_by_bytes(write, train, opened):
    texts = ["".join(chr(0x4E00 + (i * 37 + j) % 3000) for j in range(60)) + " 小城" * 9 for i in range(100)]
    tokenizer = opened(write("vocab.model", train(texts, 700)))
    assert tokenizer.vocab_size <= 700
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
    assert len(tokenizer.encode("小城")) < len(tokenizer.encode(texts[0][:2])) <= 7
    with pytest.raises(ConfigError, match=r"no vocabulary of 700 can be made of these texts: .+"):
        train([], 700)


def test_palm_splits_digits(write):
    tokenizer = PaLMTokenizer(write("tokenizer.model", train_palm([*TEXTS, "2024 2024 2024 1234567890 "] * 5, 600)))
    assert len(tokenizer.encode("2024")) == 4
    with pytest.raises(ConfigError, match="too small"):
        train_palm(TEXTS, 100)
    with pytest.raises(ConfigError, match="--chat: PaLMTokenizer"):
        chat_prompt(tokenizer, TALK)


LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
T5 = {
    "model_type": "unigram",
    "vocab_size": 150,
    "pad_id": 0,
    "eos_id": 1,
    "unk_id": 2,
    "bos_id": -1,
    "byte_fallback": False,
}
WITHOUT_BEGINNING = {"bos_id": -1, "eos_id": 1, "user_defined_symbols": TURNS}


@pytest.mark.parametrize(
    ("opened", "options", "beside", "message"),
    [
        (pangu_tokenizer, LLAMA, {}, "neither PanGu-alpha's, which begins with '<unk>', '<s>', '</s>', '▃'"),
        (pangu_tokenizer, {}, {}, "pieces that begin with '<unk>', '<s>', '</s>', '<0x00>', '<0x01>': neither"),
        (pangu_tokenizer, T5, {}, "that begin with '<pad>', '</s>', '<unk>'"),
        (pangu_tokenizer, WITHOUT_BEGINNING, {}, "nor openPangu's, which has [unused9] and [unused10] and a token that"),
        (PanGuTokenizer, LLAMA, {}, "not PanGu-alpha's tokenizer but a SentencePiece model of "),
        (OpenPanguTokenizer, LLAMA, {}, "not openPangu's tokenizer, which has [unused9] and [unused10], but"),
        (PaLMTokenizer, LLAMA, {}, "'<0x01>', which adds a space before every text"),
        (PaLMTokenizer, T5, {}, "which does not spell what it lacks in bytes, changes text by the rule nmt_nfkc"),
        (code_tokenizer, T5, {}, "not ChatGLM2's tokenizer, which has <s>, </s> and a piece for each byte, but"),
        (code_tokenizer, LLAMA, {"tokenizer_class": "LlamaTokenizer"}, "says that it is a LlamaTokenizer"),
    ],
)  # fmt: skip
def test_another_models_vocabulary_is_refused_by_what_it_holds(write, tmp_path, opened, options, beside, message):
    path = write("tokenizer.model", sentencepiece_model(**options))
    if beside:
        write_config(tmp_path, **beside)
    with pytest.raises(ConfigError) as error:
        opened(path)
    assert message in error.value.problems[0] and str(path) in error.value.problems[0]


def test_another_models_list_of_tokens_is_refused_by_the_configuration_beside(tmp_path):
    glm4_files(tmp_path)
    write_config(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(ConfigError, match="says that it is a PreTrainedTokenizerFast"):
        code_tokenizer(tmp_path / "tokenizer.model")
    write_config(tmp_path, tokenizer_class="ChatGLM4Tokenizer")
    assert isinstance(code_tokenizer(tmp_path / "tokenizer.model"), GLM4Tokenizer)


def test_a_tokenizer_json_without_what_every_text_begins_with_is_refused(tmp_path):
    glm4_files(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("[gMASK]", "[hMASK]"))
    with pytest.raises(ConfigError, match=r"not GLM-4's tokenizer: it has no special token \[gMASK\]"):
        code_tokenizer(path)


def test_names_of_special_tokens_are_text_to_sentencepiece_where_they_are_not_meant(write):
    path = write("tokenizer.model", sentencepiece_model(user_defined_symbols=[*TURNS, "qqq"]))
    tokenizer = OpenPanguTokenizer(path)
    for text in ("a[unused9]b", "［unused9］", "[unused10]"):
        ids = tokenizer.encode_document(text)[1:]
        assert not set(ids) & set(tokenizer.special.values())
        assert tokenizer.decode([1, *ids]).strip() == normalize("NFKC", text)
    assert tokenizer.pieces.piece_to_id("qqq") in tokenizer.encode_document("x qqq")  # text as well
