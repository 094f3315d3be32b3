# SPDX-License-Identifier: Apache-2.0
"""Files from a stranger, wherever one is named: each is refused in clear lines, soon, and says nothing of what is in it."""

import json
import os
import random
import struct
import time
import unicodedata

import pytest
from conftest import CONFIGS, ROOT, in_process

from sporeloom.checkpoint.adapters import read_adapter
from sporeloom.checkpoint.model_folder import load_config, write_config
from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError, printable
from sporeloom.core.patterns import match_patterns
from sporeloom.core.reader import fields_from
from sporeloom.data.chat_template import ChatTemplate
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.models.family import size_config
from sporeloom.models.paths import alternatives, path_matches

TEXT = ROOT / "examples" / "small_town.txt"
TRAIN = ("train", "--data", TEXT)
SECRET = "hunter2correcthorse"
SECONDS = 20.0


def model_folder(folder):
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, "pangu", size_config("pangu", "tiny"))
    return folder


def of_strategy(folder):
    return folder / "s.yaml", (*TRAIN, "--strategy", folder / "s.yaml")


def of_rules(folder):
    (folder / "strategy.yaml").write_text("mesh: {tp: 2}\nrules: r.yaml\n")
    return folder / "r.yaml", ("dry_run", "--strategy", folder / "strategy.yaml")


def of_cluster(folder):
    asked = ("plan", "--model", "pangu", "--size", "tiny", "--devices", 4, "--global-batch-size", 8)
    return folder / "c.yaml", (*asked, "--cluster", folder / "c.yaml")


def of_dimensions(folder):
    asked = ("plan", "--cluster", "ascend910b", "--devices", 4, "--global-batch-size", 8)
    return folder / "d.yaml", (*asked, "--config", folder / "d.yaml")


def of_model_file(folder):
    return folder / "m.json", (*TRAIN, "--config", folder / "m.json")


def of_run_file(folder):
    return folder / "run.yaml", (*TRAIN, "--run", folder / "run.yaml")


def of_curriculum(folder):
    return folder / "cur.yaml", (*TRAIN, "--curriculum", folder / "cur.yaml")


def of_certificate(folder):
    return folder / "cert.json", (
        *TRAIN,
        "--strategy",
        "pangu_tiny_dp2",
        "--certificate",
        folder / "cert.json",
        "--launch",
    )


def of_manifest(folder):
    step = folder / "checkpoints" / "step-00000001"
    step.mkdir(parents=True, exist_ok=True)
    return step / "manifest.json", ("checkpoint_info", folder / "checkpoints")


def of_config(folder):
    model_folder(folder / "model")
    return folder / "model" / "config.json", ("generate", "--checkpoint", folder / "model", "--prompt", "a")


def of_adapter_config(folder):
    (folder / "adapter").mkdir(exist_ok=True)
    return folder / "adapter" / "adapter_config.json", ("generate", "--checkpoint", folder / "adapter", "--prompt", "a")


def of_published_config(folder):
    (folder / "hf").mkdir(exist_ok=True)
    asked = ("convert_checkpoint", folder / "hf", folder / "out", "--from", "huggingface", "--to", "ours")
    return folder / "hf" / "config.json", asked


def of_tokens(folder):
    (folder / "tokens").mkdir(exist_ok=True)
    return folder / "tokens" / "dataset.json", ("train", "--data", folder / "tokens")


def of_tokenizer(folder):
    asked = ("preprocess", "tokenize", TEXT, "--out", folder / "out", "--tokenizer", folder / "t.model")
    return folder / "t.model", asked


def filtered(path):
    return ("preprocess", "filter", path, "--out", path.parent / "o.jsonl", "--min-chars", 1, "--workers", 1)


def of_lines(folder):
    return folder / "l.jsonl", filtered(folder / "l.jsonl")


def of_packed_lines(kind):
    def of(folder):
        path = folder / f"l.{kind}"
        return path, filtered(path)

    return of


def of_translation(name):
    def of(folder):
        return folder / name, ("translate", folder / name, "--to", "ours")

    return of


def of_earlier_results(folder):
    asked = ("evaluate", "lm-eval", "--checkpoint", folder / "none", "--tasks", "piqa", "--compare", folder / "r.json")
    return folder / "r.json", asked


def of_tasks(folder):
    return folder / "t.yaml", ("evaluate", "lm-eval", "--checkpoint", folder / "none", "--tasks", folder / "t.yaml")


def of_problems(folder):
    asked = ("evaluate", "humaneval-x", "--data", folder, "--checkpoint", folder / "none", "--output-dir", folder / "o")
    return folder / "humaneval_python.jsonl.gz", asked


def of_examples(folder):
    (folder / "model").mkdir(exist_ok=True)
    return folder / "x.jsonl", (
        "sft",
        "--data",
        folder / "x.jsonl",
        "--from-checkpoint",
        model_folder(folder / "model"),
    )


def of_prompts(folder):
    asked = ("generate", "--checkpoint", model_folder(folder / "model"), "--prompt-file", folder / "p.jsonl")
    return folder / "p.jsonl", asked


def of_ids(folder):
    return folder / "i.npy", ("score", "--checkpoint", model_folder(folder / "model"), "--ids", folder / "i.npy")


READERS = {
    name.removeprefix("of_").replace("_", " "): read
    for name, read in {**globals()}.items()
    if name.startswith("of_") and name not in ("of_packed_lines", "of_translation")
}
PACKED = ("jsonl.gz", "jsonl.zst", "jsonl.bz2", "jsonl.xz", "parquet", "warc.gz")
READERS |= {kind: of_packed_lines(kind) for kind in PACKED}
READERS |= {name: of_translation(name) for name in ("mf.yaml", "megatron.sh", "ds.json")}
ANY_BYTES = ("lines", "examples", "prompts")
"""What is read line by line: one long line of nonsense is one mistake, as anything."""

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
SHADOW = f"root:$6${SECRET}:19000:0:99999:7:::\n" * 3
CONTENTS = {
    "nothing": b"",
    "random bytes": random.Random(0).randbytes(3000),
    "zeros": bytes(1000),
    "a password file": SHADOW.encode(),
    "keys and secrets": f"password: {SECRET}\ntoken: [{SECRET}]\n".encode(),
    "secrets in JSON": json.dumps({"password": SECRET, "nested": {"token": [SECRET]}}).encode(),
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep mappings": b'{"a":' * 100_000,
    "a bomb of anchors": BOMB.encode(),
    "a list": b"[1, 2]",
    "a word": b'"x"',
    "a long number": b"9" * 100_000,
    "keys that steer a terminal": b'{"\\u001b[2J\\u202egnp\\nerror: nothing is wrong": 1}',
    "half a surrogate": b'{"\\ud800": "\\udfff"}',
    "a long key": json.dumps({"k" * 100_000: 1}).encode(),
    "many keys": json.dumps({f"key{number}": number for number in range(5000)}).encode(),
}
OF_PACKED = ("nothing", "random bytes", "zeros", "a password file")
"""Nothing of CONTENTS is packed: what else is wrong with them is never looked at in a packed file."""


def check_refused(outcome, begun):
    lines = outcome.output.splitlines()
    assert outcome.code in (1, 2), outcome.output[-2000:]
    assert "Traceback" not in outcome.output
    assert time.monotonic() - begun < SECONDS
    assert SECRET not in outcome.output
    assert lines and len(lines) < 100 and max(map(len, lines)) < 1500
    assert not [c for c in outcome.output if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    return lines


def call(arguments, cwd):
    begun = time.monotonic()
    tool, *rest = arguments
    return check_refused(in_process(f"tools/{tool}.py", *rest, cwd=cwd), begun)


@pytest.mark.parametrize("kind", READERS)
def test_whatever_is_in_a_file_it_is_refused_in_lines(kind, tmp_path):
    for name in OF_PACKED if kind in PACKED else CONTENTS:
        path, arguments = READERS[kind](tmp_path)
        path.write_bytes(CONTENTS[name])
        try:
            lines = call(arguments, tmp_path)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        assert any(line.startswith("error: ") for line in lines), (name, lines)


def put_fifo(path):
    os.mkfifo(path)


def put_link(target):
    return lambda path: path.symlink_to(target)


SPECIAL = {
    "a pipe": put_fifo,
    "a device without end": put_link("/dev/zero"),
    "a terminal": put_link("/dev/tty"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": put_link("none"),
}


@pytest.mark.parametrize("put", SPECIAL.values(), ids=SPECIAL)
def test_what_is_no_regular_file_is_refused_wherever_it_is_named(put, tmp_path):
    for number, (name, reader) in enumerate(READERS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, arguments = reader(folder)
        path.unlink(missing_ok=True)
        put(path)
        try:
            call(arguments, folder)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--data", TEXT, "--resume", "loop"),
        ("train", "--data", TEXT, "--output-dir", "loop"),
        (
            "plan",
            *[
                "--model",
                "pangu",
                "--size",
                "tiny",
                "--cluster",
                "ascend910b",
                "--devices",
                "4",
                "--global-batch-size",
                "8",
            ],
            "--out",
            "loop",
            "--overwrite",
        ),
        ("translate", CONFIGS / "pangu_tiny_dp2.yaml", "--to", "mindformers1", "--out", "loop", "--overwrite"),
        ("export_checkpoint", "loop", "out"),
        ("serve", "loop"),
    ],
    ids=lambda words: f"{words[0]} {[word for word in words if str(word).startswith('--')][-1:]}",
)
def test_links_in_a_circle_are_a_line(words, tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("second")
    (tmp_path / "second").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    lines = call(words, tmp_path)
    assert any(line.startswith("error: ") and "loop" in line for line in lines), lines


SIZES = [
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "seq_len",
    "vocab_size",
]


@pytest.mark.parametrize("number", [10**9, 2**31, 10**18, -1, 0, True, "x", None, 1e300, [1], {}])
@pytest.mark.parametrize("name", SIZES)
def test_absurd_sizes_are_refused_before_anything_is_made_of_them(tmp_path, name, number):
    folder = model_folder(tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, name: number}))
    begun = time.monotonic()
    try:
        load_config(folder)
    except ConfigError:
        pass
    else:  # what a model may say; its weights then are not there
        assert name != "num_layers" and (number is None or number == 10**9)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("line", ["num_microbatches: 1000000000", "virtual_stages: 1000000000"])
def test_absurd_numbers_of_a_strategy_are_refused(tmp_path, line):
    path = tmp_path / "s.yaml"
    path.write_text(f"mesh: {{pp: 2}}\npipeline: {{{line}}}\n")
    assert any("must be at most 10,000" in shown for shown in call((*TRAIN, "--strategy", path), tmp_path))


SLOW = ["(([a-z])+.)+[A-Z]([a-z])+$", "(a|aa)+$", "^(.*?,){11}P", "(x+x+)+y"]
KEYS = ["target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern"]
PATTERNS = [(each, key) for each in ("(.*.*)*!", "(", "(?P<x", "*", "a{99999999999999}") for key in KEYS]


@pytest.mark.parametrize(("pattern", "key"), [*PATTERNS, ("([a-z.0-9]+)+!", "target_modules")])
def test_a_pattern_of_an_adapter_takes_no_longer_than_it_may(tmp_path, key, pattern):
    value = {pattern: 3} if key.endswith("_pattern") and key != "layers_pattern" else pattern
    more = {"target_modules": ["query"], "layers_to_transform": [0]} if key == "layers_pattern" else {}
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **more, key: [value] if key == "layers_pattern" else value}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.layers.0.attention.query.lora_A.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [2, 128], "data_offsets": [0, 1024]}}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(1024))
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        read_adapter(folder, "pangu", size_config("pangu", "tiny"))
    assert time.monotonic() - begun < SECONDS
    assert all("\n" not in problem for problem in caught.value.problems)


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_backtrack_without_end_are_stopped(pattern):
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="takes more than 1 s"):
        match_patterns([("match", pattern)], ["a" * 5000 + "," * 40 + "!", "x" * 5000])
    assert time.monotonic() - begun < SECONDS
    assert match_patterns([("fullmatch", "a.*")], ["ab", "b"]) == {("fullmatch", "a.*"): {"ab": {}}}


def test_patterns_of_rules_are_matched_in_one_pass():
    begun = time.monotonic()
    assert not path_matches("*a" * 100 + "b", "a" * 300)
    assert not path_matches("|".join("abcdefgh") + (".a|b" * 200), "a." * 199 + "c")
    with pytest.raises(ConfigError, match="stands for"):
        alternatives(".".join(["a|b"] * 60))
    assert time.monotonic() - begun < 2


def test_adapters_in_a_circle_are_refused(tmp_path):
    for length in (1, 2, 3):
        folders = [tmp_path / f"{length}-{number}" for number in range(length)]
        for folder, base in zip(folders, [*folders[1:], folders[0]], strict=True):
            folder.mkdir()
            config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
            (folder / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=r"in a circle|their own folder"):
            load_config(folders[0])
        call(("generate", "--checkpoint", folders[-1], "--prompt", "a"), tmp_path)


TEMPLATES = {
    "a loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9**(9**9) }}",
    "a long text": "{{ 'a' * 3000000000 }}",
    "a text that doubles": "{% set n = namespace(s='a'*99) %}"
    "{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "depth": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "a division by zero": "{{ 1/0 }}",
    "a wrong type": "{{ messages[0].content + 1 }}",
    "a wrong place": "{{ messages[5].content }}",
    "a wide text": "{{ 'a'.ljust(10**20) }}",
    "a centred text": "{{ 'a'.center(10000000000) }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a module": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "a message that steers a terminal": "{{ raise_exception('\\u001b[2J\\nerror: x') }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_what_a_template_does_wrong_is_one_line(tmp_path, template):
    path, begun = tmp_path / "t.jinja", time.monotonic()
    path.write_text(template)
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(path).prompt([ChatMessage("user", "hi")])
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}: ") and "\n" not in problem and "\x1b" not in problem
    assert time.monotonic() - begun < SECONDS


def test_control_characters_are_escaped_and_ordinary_ones_are_not():
    steering = "\x1b[31m\r\n\t\x07\x7f\x9b\u202e\u2066\u200b\ufeff\u2028\ud800\U000e0041"
    assert printable(steering).isascii() and printable(steering).isprintable()
    assert printable(steering).startswith(r"\x1b[31m\r\n\t\x07\x7f\x9b\u202e")
    assert printable("naïve 小城 Ж é ∑ 🙂　 x") == "naïve 小城 Ж é ∑ 🙂　 x"
    assert ConfigError(["a\nb", "c"]).problems == [r"a\nb", "c"]
    assert len(printable("x" * 10**6)) < 1500


@pytest.mark.parametrize("kind", ["strategy", "rules", "cluster", "run file", "model file", "config", "adapter config"])
def test_a_message_says_a_key_and_nothing_of_what_stands_there(kind, tmp_path):
    for text in (
        SHADOW,
        f"a: &x {SECRET}\nb: *{SECRET}\n",
        f'x: "{SECRET}\n',
        f"key: !!int {SECRET}\n",
    ):
        path, arguments = READERS[kind](tmp_path)
        path.write_text(text)
        call(arguments, tmp_path)


def test_a_strategy_that_is_named_as_rules_is_not_one(tmp_path):
    assert (CONFIGS / "pangu_tiny_dp2.yaml").is_file()
    with pytest.raises(ConfigError):
        fields_from(type(size_config("pangu", "tiny")), Document("here", {"vocab_size": {SECRET: 1}}))
