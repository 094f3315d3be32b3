# SPDX-License-Identifier: Apache-2.0
"""`sporeloom tokenizer train`: what it makes is what the families open, the same on each run."""

import gzip
import json
import re

import pytest
import sentencepiece
from conftest import ROOT, in_process, run

from codegeex.tokenizer import CodeGeeXTokenizer
from codegeex.tokenizer import train_tokenizer as train_codegeex
from palm.tokenizer import MIN_VOCAB_SIZE, PaLMTokenizer
from palm.tokenizer import train_tokenizer as train_palm
from pangu.tokenizer import SPECIAL, PanGuTokenizer
from pangu.tokenizer import train_tokenizer as train_pangu

TEXT = ROOT / "examples" / "small_town.txt"
DOCUMENTS = TEXT.read_text(encoding="utf-8").strip("\n").split("\n\n")
TRAIN = {"pangu": train_pangu, "palm": train_palm, "codegeex": train_codegeex}
OPEN = {"pangu": PanGuTokenizer, "palm": PaLMTokenizer, "codegeex": CodeGeeXTokenizer}
NAMES = {"pangu": "t.model", "palm": "t.model", "codegeex": "t.json"}
LOSSLESS = ("palm", "codegeex")


def train(folder, *arguments, name="t.model", size=400, model="palm"):
    words = ("--vocab-size", size, "--model", model, "--out", folder / name)
    return in_process("tools/tokenizer.py", "train", *arguments, *words)


@pytest.mark.parametrize("model", TRAIN)
def test_a_small_corpus_gives_the_tokenizer_of_its_documents(tmp_path, model):
    done = train(tmp_path, TEXT, name=NAMES[model], model=model)
    assert done.code == 0, done.output
    path = tmp_path / NAMES[model]
    assert path.read_bytes() == TRAIN[model](DOCUMENTS, 400)
    tokenizer = OPEN[model](path)
    assert tokenizer.vocab_size == 400
    report = json.loads(done.output[done.output.index("{") :])
    assert report["documents"] == len(DOCUMENTS)
    assert report["text_bytes"] == sum(len(document.encode()) for document in DOCUMENTS)
    if model in LOSSLESS:
        odd = "new\tline\n\n  两 spaces 龘 🙂"
        assert tokenizer.decode(tokenizer.encode_document(odd)) == odd


def test_the_character_that_sentencepiece_reserves_costs_no_passage(tmp_path):
    """It would leave out the whole passage, and say so nowhere."""
    lines = [f"alpha beta gamma {number}" for number in range(300)]
    path = tmp_path / "bars.txt"
    path.write_text(
        "\n\n".join(lines + [f"zebra quokka wombat {number} \u2583\u2584\u2585\u2586" for number in range(300)])
    )
    assert train(tmp_path, path, size=340).code == 0
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t.model"))
    assert {"zebra", "quokka"} <= {pieces.id_to_piece(i).strip("\u2581") for i in range(pieces.get_piece_size())}
    path.write_text("\0\n\n\0\0")
    done = train(tmp_path, path, name="none.model")
    assert done.code == 2 and "no characters that a piece can be made of" in done.output, done.output


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_smallest_vocabulary_can_be_trained(tmp_path, kind):
    assert train(tmp_path, TEXT, "--kind", kind, size=MIN_VOCAB_SIZE).code == 0
    done = train(tmp_path, TEXT, "--kind", kind, size=MIN_VOCAB_SIZE - 1, name="smaller.model")
    assert done.code == 2 and f"give {MIN_VOCAB_SIZE} or more" in done.output


@pytest.mark.parametrize(("model", "kind"), [("pangu", "bpe"), ("palm", "unigram")])
def test_the_other_algorithm_makes_a_tokenizer_of_the_family(tmp_path, model, kind):
    done = train(tmp_path, TEXT, "--kind", kind, model=model, size=600)
    assert done.code == 0, done.output
    tokenizer = OPEN[model](tmp_path / "t.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t.model"))
    learned = [i for i in range(600) if not (pieces.is_control(i) or pieces.is_byte(i) or pieces.is_unknown(i))]
    scores = [pieces.get_score(i) for i in learned if pieces.id_to_piece(i) not in SPECIAL]
    # BPE numbers its merges, unigram has logarithms of probabilities.
    assert (scores == [-float(rank) for rank in range(len(scores))]) == (kind == "bpe")
    assert tokenizer.vocab_size == 600
    assert tokenizer.decode(tokenizer.encode("小城 鑫龘")) == "小城 鑫龘"


def test_documents_of_every_kind_of_file_are_one_corpus(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = "".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS[:10])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(arrow.table({"body": DOCUMENTS[10:20]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("\n\n".join(DOCUMENTS[20:]), encoding="utf-8")
    inputs = [tmp_path / name for name in ("a.jsonl.gz", "b.parquet", "c.txt")]
    done = train(tmp_path, *inputs, "--key", "body")
    assert done.code == 0, done.output
    assert (tmp_path / "t.model").read_bytes() == train_palm(DOCUMENTS, 400)


@pytest.mark.parametrize("model", ["palm", "codegeex"])
def test_a_sample_makes_the_same_tokenizer_in_every_process(tmp_path, model):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{text}{n}"}) + "\n" for n in range(20) for text in DOCUMENTS))
    sampled = ("--max-passages", 60)
    done = train(tmp_path, corpus, *sampled, model=model, size=420, name=f"1{NAMES[model]}")
    assert done.code == 0 and '"trained_passages": 60' in done.output, done.output
    words = ("tokenizer", "train", corpus, *sampled, "--vocab-size", 420, "--model", model)
    again = run("-m", "sporeloom", *words, "--out", tmp_path / f"2{NAMES[model]}")
    assert again.code == 0, again.output
    first, second = ((tmp_path / f"{number}{NAMES[model]}").read_bytes() for number in (1, 2))
    assert first == second
    assert train(tmp_path, corpus, *sampled, "--seed", 2, model=model, size=420, name=f"3{NAMES[model]}").code == 0
    assert (tmp_path / f"3{NAMES[model]}").read_bytes() != first


@pytest.mark.parametrize("model", ["palm", "codegeex"])
def test_a_vocabulary_that_the_text_does_not_fill_is_refused_with_the_largest_that_it_does(tmp_path, model):
    def tried(size):
        return train(tmp_path, TEXT, model=model, name=NAMES[model], size=size)

    refused = tried(50_000)
    assert refused.code == 2, refused.output
    size = int(
        re.search(r"these texts make at most (\d+) tokens; give --vocab-size \1, or more text", refused.output)[1]
    )
    assert not (tmp_path / NAMES[model]).exists()
    above = tried(size + 1)
    assert above.code == 2 and f"at most {size} tokens" in above.output
    assert tried(size).code == 0
    assert OPEN[model](tmp_path / NAMES[model]).vocab_size == size


def test_a_size_that_is_recommended_is_filled_also_where_rare_characters_are_left_out(tmp_path):
    refused = train(tmp_path, TEXT, model="pangu", size=800)
    assert refused.code == 2
    most, size = map(int, re.search(r"at most (\d+) tokens, and fewer .* --vocab-size (\d+),", refused.output).groups())
    assert size < most < 800
    assert train(tmp_path, TEXT, model="pangu", size=size).code == 0


@pytest.mark.parametrize("model", TRAIN)
def test_a_corpus_without_text_is_refused(tmp_path, model):
    (tmp_path / "empty.jsonl").write_text('{"text": "  "}\n')
    done = train(tmp_path, tmp_path / "empty.jsonl", model=model, name=NAMES[model], size=600)
    assert done.code == 2
    assert f"{tmp_path / 'empty.jsonl'}: contains no text" in done.output
    assert not (tmp_path / NAMES[model]).exists()


@pytest.mark.parametrize("model", ["palm", "codegeex"])
def test_a_document_that_cannot_be_read_stops_or_is_counted(tmp_path, model):
    path, name = tmp_path / "corpus.jsonl", NAMES[model]
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    path.write_text("\n".join([*lines[:5], '{"body": "x"}', *lines[5:]]))
    stopped = train(tmp_path, path, model=model, name=name)
    assert stopped.code == 2
    assert f"{path}:6: no `text` field with a string; found: body" in stopped.output
    assert not (tmp_path / name).exists()
    done = train(tmp_path, path, "--on-error", "skip", model=model, name=name)
    assert done.code == 0 and '"broken": 1' in done.output
    assert (tmp_path / name).read_bytes() == TRAIN[model](DOCUMENTS, 400)


def test_an_output_that_exists_is_kept(tmp_path):
    (tmp_path / "t.model").write_text("mine")
    refused = train(tmp_path, TEXT)
    assert refused.code == 2
    assert f"--out {tmp_path / 't.model'}: is there already" in refused.output
    assert (tmp_path / "t.model").read_text() == "mine"
    assert train(tmp_path, TEXT, "--overwrite").code == 0
    assert PaLMTokenizer(tmp_path / "t.model").vocab_size == 400


def test_all_that_does_not_fit_the_family_is_reported_at_once(tmp_path):
    done = train(tmp_path, TEXT, "--kind", "bpe", model="codegeex", size=300)
    assert done.code == 2
    for said in ("--kind bpe: codegeex takes byte-level-bpe", "give 400 or more", "ends in .json"):
        assert said in done.output
    assert "did you mean palm?" in train(tmp_path, TEXT, model="plam").output
