# SPDX-License-Identifier: Apache-2.0
"""What lies in a cache is run or believed only where nobody else can have put it there, and as it was written."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from sporeloom.core import compiled
from sporeloom.core.files import make_private, read_private
from sporeloom.inference.kernels import kernel_library
from sporeloom.runtime.spmd import compilation_cache

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
STRANGER = 12345
LOADED = "import sys; from sporeloom.inference.kernels import kernel_library; print(kernel_library())"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache with a library, and one that leaves a mark when it is loaded."""
    root = tmp_path_factory.mktemp("cache")
    source = root / "evil.c"
    source.write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) static void f(void) {{ fclose(fopen("{root}/LOADED", "w")); }}\n'
        "void use_threads(int n) {}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(root / "evil.so")], check=True)
    return root


@pytest.fixture
def cache(built, tmp_path, monkeypatch):
    """A private copy of the cache, made by `kernel_library` once. The compiler optimizes nothing: it is soon done."""
    quick = built / "quick-cc"
    quick.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CC", str(quick))
    monkeypatch.setenv("XDG_CACHE_HOME", str(built / "good"))
    assert kernel_library() is not None
    shutil.copytree(built / "good", tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (built / "LOADED").unlink(missing_ok=True)
    return tmp_path / "cache" / "sporeloom" / "kernels"


def library_of(folder):
    (path,) = folder.glob("*.so")
    return path


def put(path, content, owner=None, mode=0o700):
    """Another file under that name, as a stranger or a fault leaves it."""
    new = path.with_name("new")
    new.write_bytes(content)
    new.chmod(mode)
    if owner is not None:
        os.chown(new, owner, owner)
    new.replace(path)


@needs_compiler
def test_a_kept_library_is_used_and_nobody_else_may_enter_its_folder(cache, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "_build", None)
    assert kernel_library() == library_of(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err == ""


DAMAGE = {
    "empty, after a power cut": lambda content, _: b"",
    "cut": lambda content, _: content[:9000],
    "a bit of its code": lambda content, _: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "its last bit": lambda content, _: content[:-1] + bytes([content[-1] ^ 0x80]),
    "another library": lambda _, evil: evil,
}


@needs_compiler
@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_not_loaded_but_built_again(built, cache, harm, capsys):
    path = library_of(cache)
    good = path.read_bytes()
    put(path, harm(good, (built / "evil.so").read_bytes()))
    found = kernel_library()
    assert found is not None and found.read_bytes() == good
    assert "its content is not what was built; building kernels.c again" in capsys.readouterr().err
    assert not (built / "LOADED").exists()


@needs_compiler
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_library_that_others_may_write_is_built_again(cache, mode, capsys):
    library_of(cache).chmod(mode)
    found = kernel_library()
    assert found is not None and found.stat().st_mode & 0o022 == 0
    assert "alone may write to; building kernels.c again" in capsys.readouterr().err


@needs_compiler
def test_a_link_is_not_followed(built, cache, capsys):
    path = library_of(cache)
    path.rename(cache.parent / "elsewhere.so")
    path.symlink_to(cache.parent / "elsewhere.so")
    found = kernel_library()
    assert found is not None and not found.is_symlink()


@needs_compiler
@needs_root
def test_a_library_of_somebody_else_is_not_loaded(built, cache):
    path = library_of(cache)
    put(path, path.read_bytes(), STRANGER)
    found = kernel_library()
    assert found is not None and found.stat().st_uid == os.getuid()


@needs_compiler
@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o722])
def test_what_lay_in_a_folder_that_others_could_write_to_is_removed(built, cache, mode):
    cache.chmod(mode)
    put(library_of(cache), (built / "evil.so").read_bytes(), STRANGER)
    (cache / "more.so").write_bytes(b"x")
    code = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert code.returncode == 0 and str(library_of(cache)) in code.stdout, code.stderr
    assert not (built / "LOADED").exists()
    assert cache.stat().st_mode & 0o777 == 0o700 and not (cache / "more.so").exists()


@needs_compiler
@needs_root
def test_a_folder_of_somebody_else_is_not_used(cache, capsys):
    os.chown(cache, STRANGER, STRANGER)
    assert kernel_library() is None
    said = capsys.readouterr().err
    assert (
        f"kernels.c cannot be used, decoding is slower: {cache}: of user {STRANGER}" in said and said.count("\n") == 1
    )


@needs_compiler
def test_a_file_or_a_link_in_place_of_the_folder_is_not_used(cache, tmp_path, capsys):
    shutil.move(cache, tmp_path / "moved")
    cache.symlink_to(tmp_path / "moved")
    assert kernel_library() is None
    cache.unlink()
    cache.write_text("x")
    assert kernel_library() is None
    assert capsys.readouterr().err.count("not a folder, must be a folder of user") == 2


def test_the_evil_library_would_have_been_noticed(built):
    """So the tests above can fail."""
    (built / "LOADED").unlink(missing_ok=True)
    code = f"import ctypes; ctypes.CDLL({str(built / 'evil.so')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (built / "LOADED").exists()


def test_private_files_and_folders(tmp_path):
    make_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    file = tmp_path / "a" / "b" / "file"
    file.write_bytes(b"x")
    for mode, is_read in ((0o600, True), (0o644, True), (0o660, False), (0o606, False)):
        file.chmod(mode)
        if is_read:
            assert read_private(file) == b"x"
        else:
            with pytest.raises(OSError, match="alone may write to"):
                read_private(file)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(OSError, match="alone may write to"):  # and does not wait for a writer
        read_private(tmp_path / "fifo")
    (tmp_path / "a" / "b").chmod(0o755)  # of an earlier release: others could look, not write
    make_private(tmp_path / "a" / "b")
    assert file.exists() and (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_kept_graph_that_others_may_write_is_not_read(tmp_path, capsys):
    body = b"{}\n"
    compilation_cache._write(tmp_path / "a.graph", body)
    assert (tmp_path / "a.graph").stat().st_mode & 0o777 == 0o600
    (tmp_path / "a.graph").chmod(0o666)
    assert compilation_cache._read(tmp_path / "a.graph") is None
    assert "is not used: not a file that user" in capsys.readouterr().err
    assert (tmp_path / "a.graph").exists()
