# SPDX-License-Identifier: Apache-2.0
"""No verb replaces what is there without --overwrite; with it the old one goes when the new one is complete."""

import dataclasses
import importlib
import os
import subprocess
import types
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from sporeloom.checkpoint.reshard import new_folder
from sporeloom.cli import COMMANDS
from sporeloom.core.command_line import Overwrite, argument, option, output, output_argument, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import own_name, recover_folder, replaced_folder, write_text_atomically
from sporeloom.core.outputs import OUTPUT, replacing
from sporeloom.train.config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Asked(Overwrite):
    source: Path = argument("to read")
    target: Path = output_argument("to write")
    extra: Path | None = output(None, "also to write")
    count: int = option(1, "of something")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("in")
    return tmp_path


def asked(*words):
    return parse_args(Asked, "", ["in", *words])


@pytest.mark.parametrize(
    ("make", "is_refused"),
    [
        (lambda path: None, False),
        (lambda path: path.write_text("old"), True),
        (lambda path: path.mkdir(), False),  # nothing would be lost
        (lambda path: (path.mkdir(), (path / "x").write_text("old")), True),
        (lambda path: path.symlink_to("nowhere"), True),
    ],
)
@pytest.mark.parametrize("where", ["TARGET", "--extra"])
def test_what_is_there_is_refused(here, make, is_refused, where):
    make(here / "o")
    words = ["o"] if where == "TARGET" else ["new", "--extra", "o"]
    if is_refused:
        with pytest.raises(ConfigError, match=f"^{where} o: is there already; .* --overwrite"):
            asked(*words)
    else:
        asked(*words)
    assert asked(*words, "--overwrite").overwrite


def test_all_outputs_and_all_mistakes_are_told_at_once(here):
    for name in ("a", "b"):
        (here / name).write_text("old")
    with pytest.raises(ConfigError) as raised:
        asked("a", "--extra", "b", "--count", "many", "--overwrit")
    assert [problem.split(" (see")[0][:40] for problem in raised.value.problems] == [
        "unrecognized arguments: --overwrit; did you"[:40],
        "argument --count: invalid int value: 'many'"[:40],
        "TARGET a: is there already; remove it or"[:40],
        "--extra b: is there already; remove it or"[:40],
    ]


@pytest.mark.parametrize("folder", [".", "..", "holder"])
def test_a_folder_that_holds_more_is_not_replaced(here, folder):
    (here / "holder").mkdir()
    (here / "holder/in").write_text("x")
    with pytest.raises(ConfigError, match="--overwrite would remove"):
        parse_args(Asked, "", ["holder/in", folder, "--overwrite"])


def test_what_is_read_is_not_replaced(here):
    with pytest.raises(ConfigError, match="--overwrite would remove in, which is read; give another name"):
        asked("in", "--overwrite")


def test_of_a_job_the_first_process_looks(here, monkeypatch):
    (here / "o").write_text("written by the first process meanwhile")
    monkeypatch.setenv("RANK_ID", "1")
    assert asked("o").target == Path("o")


def test_the_old_one_goes_when_the_new_one_is_complete(here):
    (here / "o").mkdir()
    (here / "o/old").write_text("old")
    config = asked("o", "--overwrite")
    with replacing(config):
        assert not (here / "o").exists()  # whoever makes it finds its place free
        (here / "o").write_text("new")
    assert (here / "o").read_text() == "new"
    assert sorted(os.listdir(here)) == ["in", "o"]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("error", [ConfigError("full"), KeyboardInterrupt(), OSError("no space")])
def test_after_an_error_the_old_one_is_back(here, begins, error):
    (here / "o").mkdir()
    (here / "o/old").write_text("old")
    with pytest.raises(type(error)), replacing(asked("o", "--overwrite")):  # noqa: PT012 (the block is what fails)
        if begins:
            (here / "o").mkdir()
            (here / "o/half").write_text("half")
        raise error
    assert (here / "o/old").read_text() == "old" and sorted(os.listdir(here / "o")) == ["old"]
    assert sorted(os.listdir(here)) == ["in", "o"]


@pytest.fixture(scope="module")
def killed():
    """The name under which a process that is no more has set something aside, or begun it."""

    def name(path, suffix):
        return own_name(path, suffix).with_name(
            own_name(path, suffix).name.replace(f"-{os.getpid()}.", f"-{done.pid}.")
        )

    done = subprocess.Popen(["true"])
    done.wait()
    return name


def test_after_a_kill_the_old_one_is_put_back_first(here, killed):
    killed(here / "o", ".replaced").write_text("old")  # what such a call leaves
    with pytest.raises(ConfigError, match="again"), replacing(asked("o", "--overwrite")):
        raise ConfigError("again")
    assert (here / "o").read_text() == "old"


CONTINUED = {("BatchConfig", "output"), ("TuneConfig", "out")}
"""Files that a verb adds to: what is there stays."""


def kinds():
    """Configurations of all verbs' command lines."""
    for verb in COMMANDS:
        module = importlib.import_module(f"sporeloom.cli.{verb.replace('-', '_')}")
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value):
                yield value


def test_every_path_that_a_verb_writes_is_under_the_rule():
    """Fields whose help says that something is written are outputs, and every verb that has one has --overwrite."""
    written = {}
    for kind in kinds():
        for field in dataclasses.fields(kind):
            hint = str(get_type_hints(kind)[field.name])
            says = field.metadata.get("help", "").lower()
            names = field.name in (
                "out",
                "output",
                "html",
                "save_result",
                "logits_out",
                "config_out",
                "report",
                "removed",
            )
            if ("Path" in hint) and (names or " to write" in says):
                written[kind.__name__, field.name] = OUTPUT in field.metadata and issubclass(kind, Overwrite)
    assert len(written) >= 15
    assert {where for where, is_ruled in written.items() if not is_ruled} == CONTINUED
    assert "overwrite" in {field.name for field in dataclasses.fields(TrainingConfig)}


def test_the_fields_of_a_verb_keep_their_help():
    field = next(field for field in dataclasses.fields(Asked) if field.name == "target")
    assert isinstance(field.metadata, types.MappingProxyType) and field.metadata["help"] == "to write"


def folder_writer(fails):
    def write(folder):
        with replaced_folder(folder) as partial:
            (partial / "new").write_text("new")
            if fails:
                raise ConfigError("full")

    return write


def old_folder(path):
    path.mkdir()
    (path / "old").write_text("old")


@pytest.mark.parametrize("fails", [False, True])
def test_writers_of_folders_replace_them_or_leave_them(here, fails):
    """As export, convert and upcycle: their folder's name is looked after twice."""
    old_folder(here / "o")
    with pytest.raises(ConfigError, match="full") if fails else nullcontext(), replacing(asked("o", "--overwrite")):
        folder_writer(fails)(here / "o")
    assert sorted(os.listdir(here / "o")) == (["old"] if fails else ["new"])
    assert sorted(os.listdir(here)) == ["in", "o"]


def test_what_a_kill_left_is_not_replaced_without_being_asked(here, killed):
    old_folder(killed(here / "o", ".replaced"))
    with pytest.raises(ConfigError, match="TARGET o: is there already"), replacing(asked("o")):
        folder_writer(False)(here / "o")
    assert sorted(os.listdir(here / "o")) == ["old"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_kill_between_two_calls_loses_neither(here, killed, fails):
    """The first was killed while its folder, which it makes file by file, was half there."""
    old_folder(killed(here / "o", ".replaced"))
    (here / "o").mkdir()
    (here / "o/half").write_text("half")
    with pytest.raises(ConfigError, match="full") if fails else nullcontext(), replacing(asked("o", "--overwrite")):
        folder_writer(fails)(here / "o")
    if fails:
        assert {tuple(os.listdir(path)) for path in here.iterdir() if path.is_dir()} == {("half",), ("old",)}
    else:
        assert sorted(os.listdir(here / "o")) == ["new"] and sorted(os.listdir(here)) == ["in", "o"]


def test_a_reader_recovers_what_a_kill_left_and_nothing_that_is_in_use(here, killed):
    old_folder(here / "used")
    with replacing(asked("used", "--overwrite")):
        recover_folder(here / "used")
        assert not (here / "used").exists()
        (here / "used").write_text("new")
    old_folder(killed(here / "left", ".replaced"))
    recover_folder(here / "left")
    assert os.listdir(here / "left") == ["old"]


def test_who_writes_removes_what_killed_writers_began(here, killed):
    """Of the same name alone, and not what a process that is there is writing."""
    running = own_name(here / "o", ".partial").with_name(
        own_name(here / "o", ".partial").name.replace(str(os.getpid()), "1")
    )
    others = [running, killed(here / "p", ".partial"), killed(here / "o.p", ".partial"), here / ".o.partial"]
    for name in [*(killed(here / name, ".partial") for name in "otn"), *others]:
        old_folder(name)
    folder_writer(False)(here / "o")
    write_text_atomically(here / "t", "new")
    with new_folder(here / "n") as partial:
        (partial / "new").write_text("new")
    assert sorted(os.listdir(here)) == sorted(["in", "n", "o", "t", *(path.name for path in others)])
