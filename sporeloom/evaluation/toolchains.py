# SPDX-License-Identifier: Apache-2.0
"""Compilers and runtimes of the languages of HumanEval-X, where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sporeloom.core.files import private_cache
from sporeloom.core.lines import split_lines
from sporeloom.evaluation.sandbox import Job, Limits, Step

COMPILE_S = 60.0
DEBIAN_GO_PATH = Path("/usr/share/gocode")
DEBIAN_CRATES = Path("/usr/share/cargo/registry")
CPP_HEADERS = {"boost/any.hpp": "libboost-dev", "openssl/md5.h": "libssl-dev"}
JS_PACKAGE = "js-md5@0.8"
GO_IMPORTS = ("bytes", "crypto/md5", "github.com/stretchr/testify/assert", "math/rand", "reflect", "regexp", "time")
CRATES = {"rand": "0.7", "regex": "1", "md5": "0.7"}
"""Crates that the Rust problems use; above are the packages of the other languages."""


class MissingToolchainError(Exception):
    """A language cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Toolchain:
    """Commands to run one source file."""

    file_name: str
    compile: Sequence[str]
    """A command; empty for none."""
    execute: Sequence[str]
    channel: Sequence[int] = (3, 4)
    """File descriptors that `rpc` reads from and writes to."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needed: Sequence[str] = ()
    overlays: Mapping[str, str] = field(default_factory=dict)

    compiled: Sequence[str] = ("main",)
    """Files that the compiler writes and the last command needs: names or patterns."""

    def compile_steps(self) -> list[Step]:
        return [Step(self.compile, COMPILE_S)] if self.compile else []

    def execute_step(self, time_s: float, wait_s: float = 0.0) -> Step:
        return Step(self.execute, time_s, self.channel, wait_s)

    def job(
        self,
        source: str | Mapping[str, str | bytes],
        steps: Sequence[Step],
        limits: Limits,
        environment: Mapping[str, str] | None = None,
        channel: Sequence[int] = (),
        keep: Sequence[str] = (),
    ) -> Job:
        """`source`: the text of the program, or files made of it before."""
        return Job(
            {self.file_name: source} if isinstance(source, str) else source,
            steps,
            limits,
            {**self.environment, **(environment or {})},
            self.needed,
            self.overlays,
            channel,
            keep,
        )


def find_toolchain(language: str) -> Toolchain:
    """The toolchain of a language, its libraries compiled once for all programs.

    Raises:
        MissingToolchainError: not installed, or without a library the problems use.
    """
    return _FINDERS[language]()


def _program(name: str) -> tuple[str, str]:
    """(real path, folder of its installation) of an installed program."""
    path = shutil.which(name)
    if path is None:
        raise MissingToolchainError(f"no {name}")
    real = Path(path).resolve()
    return str(real), str(real.parent.parent)


def _with_links(home: str) -> tuple[str, ...]:
    """A folder of a toolchain, and the targets of its links elsewhere, as Debian distributes packages."""
    found = {home: None}
    for folder, folders, files in os.walk(home):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            target = os.path.realpath(path) if os.path.islink(path) else path
            if not target.startswith(f"{home}/") and os.path.exists(target):
                found[target] = None
    return tuple(found)


def _cache_folder(name: str) -> Path:
    """Folder for the libraries of a language. Some of it is open to the isolated user, so others must have no
    access."""
    try:
        folder = private_cache("humaneval-x") / name
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise MissingToolchainError(f"its libraries cannot be kept: {error.filename}: {error.strerror}") from None
    return folder


def _prepare(command: Sequence[str], folder: Path, environment: Mapping[str, str], what: str) -> None:
    """Run a command of this package, not of a model."""
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in split_lines(done.stderr) if line.strip()] or ["no message"]
        raise MissingToolchainError(f"{what} is not available: {lines[-1].strip()} ({' '.join(command[:2])})")


def _python() -> Toolchain:
    return Toolchain("main.py", (), (sys.executable, "-I", "main.py"), needed=(sys.prefix, sys.base_prefix))


def _js() -> Toolchain:
    (node, home), folder = _program("node"), _cache_folder("node")
    if not (folder / "node_modules" / "js-md5").is_dir():
        _program("npm")
        _prepare(("npm", "install", "--silent", "--no-save", JS_PACKAGE), folder, {}, JS_PACKAGE)
    return Toolchain(
        "main.js",
        (),
        (node, "main.js"),
        environment={"NODE_PATH": str(folder / "node_modules")},
        needed=(home, str(folder)),
    )


def _cpp() -> Toolchain:
    compiler, home = _program("g++")
    for header, package in CPP_HEADERS.items():
        if subprocess.run(
            [compiler, "-E", "-include", header, "-x", "c++", os.devnull], capture_output=True
        ).returncode:
            raise MissingToolchainError(f"no {header} for g++ (Debian: {package})")
    command = (compiler, "-std=c++11", "-w", "main.cpp", "-o", "main", "-lssl", "-lcrypto")
    return Toolchain("main.cpp", command, ("{folder}/main",), needed=(home,))


def _java() -> Toolchain:
    (javac, home), (java, _) = _program("javac"), _program("java")
    quick = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xmx512m")
    compiling = (javac, *(f"-J{flag}" for flag in quick), "-nowarn", "Main.java")
    return Toolchain(
        "Main.java", compiling, (java, *quick, "Main"), channel=(0, 1), compiled=("*.class",), needed=_with_links(home)
    )


def _go() -> Toolchain:
    go, home = _program("go")
    path = DEBIAN_GO_PATH
    if not (path / "src/github.com/stretchr/testify").is_dir():
        path = Path(subprocess.run([go, "env", "GOPATH"], capture_output=True, text=True).stdout.strip())
    if not (path / "src/github.com/stretchr/testify").is_dir():
        raise MissingToolchainError("no testify for go (Debian: golang-github-stretchr-testify-dev)")
    environment = {"GOPATH": str(path), "GO111MODULE": "off", "CGO_ENABLED": "0", "GOFLAGS": "-vet=off"}
    cache, source = _cache_folder("go"), _cache_folder("go-source")
    imports = "".join(f'\n    _ "{name}"' for name in GO_IMPORTS)
    (source / "main_test.go").write_text(
        f'package main\n\nimport (\n    "testing"{imports}\n)\n\nfunc TestNothing(t *testing.T) {{}}\n'
    )
    compiling = (go, "test", "-c", "-o", "main", "main_test.go")
    _prepare(compiling, source, {**environment, "GOCACHE": str(cache)}, "testify")
    for folder, _, files in os.walk(cache):  # written by the isolated user, into an overlay
        for name in (folder, *(os.path.join(folder, file) for file in files)):
            os.chmod(name, 0o777 if name == folder else 0o666)
    return Toolchain(
        "main_test.go",
        compiling,
        ("{folder}/main", "-test.v"),
        environment={**environment, "GOCACHE": "{folder}/cache"},
        needed=(*_with_links(home), str(path), str(cache)),
        overlays={"cache": str(cache)},
    )


def _rust() -> Toolchain:
    _program("cargo")
    rustc = shutil.which("rustc")
    if rustc is None:
        raise MissingToolchainError("no rustc")
    home = subprocess.run([rustc, "--print", "sysroot"], capture_output=True, text=True).stdout.strip()
    folder = _cache_folder("rust")
    # Debian has rand 0.8 only, with which the solution of Rust/50 does not compile.
    crates = {**CRATES, "rand": "0.8"} if DEBIAN_CRATES.is_dir() else CRATES
    needs = "".join(f'{name} = "{version}"\n' for name, version in crates.items())
    (folder / "src").mkdir(exist_ok=True)
    (folder / "src/lib.rs").write_text("")
    (folder / "Cargo.toml").write_text(
        f'[package]\nname = "crates"\nversion = "0.1.0"\nedition = "2021"\n[dependencies]\n{needs}'
    )
    if DEBIAN_CRATES.is_dir():
        (folder / ".cargo").mkdir(exist_ok=True)
        (folder / ".cargo/config.toml").write_text(
            f'[source.crates-io]\nreplace-with = "debian"\n[source.debian]\ndirectory = "{DEBIAN_CRATES}"\n'
        )
    _prepare(("cargo", "build", "--quiet"), folder, {"CARGO_TARGET_DIR": str(folder / "target")}, "the crates")
    libraries = folder / "target/debug/deps"
    found = [(name, sorted(libraries.glob(f"lib{name}-*.rlib"))[-1]) for name in CRATES]
    externs = [word for name, path in found for word in ("--extern", f"{name}={path}")]
    compiler = str(Path(home) / "bin" / "rustc")
    command = (compiler, "--edition=2021", "--cap-lints=allow", "-L", f"dependency={libraries}", *externs)
    return Toolchain(
        "main.rs",
        (*command, "-o", "main", "main.rs"),
        ("{folder}/main",),
        needed=(home, str(folder)),
    )


_FINDERS: dict[str, Callable[[], Toolchain]] = {
    "python": _python,
    "cpp": _cpp,
    "java": _java,
    "js": _js,
    "go": _go,
    "rust": _rust,
}
