# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of openPangu, CodeGeeX2, CodeGeeX4 and PaLM, on vocabularies made here in the published formats."""

import base64
import io

import pytest
import sentencepiece
import tokenizers

from codegeex.glm_tokenizer import GLM2Tokenizer, GLM4Tokenizer
from codegeex.tokenizer import open_tokenizer as code_tokenizer
from palm.tokenizer import PaLMTokenizer
from palm.tokenizer import train_tokenizer as train_palm
from pangu.open_tokenizer import OpenPanguTokenizer
from pangu.tokenizer import PanGuTokenizer
from pangu.tokenizer import open_tokenizer as pangu_tokenizer
from pangu.tokenizer import train_tokenizer as train_pangu
from sporeloom.data.tokenizer import ChatMessage, chat_prompt, find_tokenizer, infill_prompt
from sporeloom.errors import ConfigError

TEXTS = [
    "小城在山脚下，一条河从城中穿过。",
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x + 1\n",
] * 20
TALK = [ChatMessage("user", "你好"), ChatMessage("assistant", "好"), ChatMessage("user", "fox")]


def sentencepiece_model(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", vocab_size=700, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def test_openpangu_begins_with_bos_and_knows_its_turns(write):
    names = [f"[unused{i}]" for i in range(12)]
    path = write("tokenizer.model", sentencepiece_model(user_defined_symbols=names))
    tokenizer = pangu_tokenizer(path)
    assert isinstance(tokenizer, OpenPanguTokenizer)
    prompt = chat_prompt(tokenizer, TALK)
    turns = ["系统：", "用户：你好", "助手：好", "用户：fox"]
    assert prompt == "".join(f"[unused9]{turn}[unused10]" for turn in turns) + "[unused9]助手："
    turn, end = (tokenizer.pieces.piece_to_id(name) for name in ("[unused9]", "[unused10]"))
    ids = tokenizer.encode(prompt)
    assert (
        ids[:2] == [1, turn]
        and ids.count(turn) == 5
        and ids.count(end) == tokenizer.encode(prompt).count(tokenizer.eod_id) == 4
    )
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
    assert chat_prompt(tokenizer, TALK) == "[Round 1]\n\n问：你好\n\n答：好\n\n[Round 2]\n\n问：fox\n\n答："


def glm4_files(folder):
    """The same vocabulary as tiktoken's lines and as a tokenizer.json: all bytes, and a few merges."""
    merges = [(b"t", b"h"), (b"th", b"e"), (b"r", b"e"), (b"re", b"t")]
    tokens = [bytes([i]) for i in range(256)] + [a + b for a, b in merges]
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    signs = _signs()
    shown = ["".join(signs[byte] for byte in token) for token in tokens]
    pairs = [("".join(signs[b] for b in a), "".join(signs[b] for b in c)) for a, c in merges]
    model = tokenizers.models.BPE(vocab={sign: rank for rank, sign in enumerate(shown)}, merges=pairs)
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.add_special_tokens(["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"])
    whole.add_special_tokens(["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"])
    whole.save(str(folder / "tokenizer.json"))


def _signs():
    """GPT-2's visible sign for each byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + place) for place, byte in enumerate(others)}


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
    assert chat_prompt(tokenizer, TALK[-1:]) == "<|user|>\nfox<|assistant|>\n"
    assert infill_prompt(tokenizer, "a = ", "\nprint(a)").startswith(
        "<|user|>\n###MODE:BLOCK\n<|code_suffix|>\nprint(a)<|code_prefix|>a = "
    )
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
