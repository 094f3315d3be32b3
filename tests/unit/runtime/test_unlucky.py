# SPDX-License-Identifier: Apache-2.0
"""A graph that MindSpore's own passes broke is compiled again, and nothing else is."""

import pytest

from sporeloom.runtime.compiler import TRIES, compile_again_if_unlucky

BROKEN = [
    "i: 2 out of range: 2, cnode: @kernel_graph13:CNode_12364{[0]: ValueNode<Primitive> Depend, [1]: param_w}",
    "Graph cycle exists, size: 20, strike node: @56575_step_construct_24182:CNode_24183",
]


def failing(message, times):
    calls = []

    def compile():
        calls.append(None)
        if len(calls) <= times:
            raise RuntimeError(message)
        return len(calls)

    return compile, calls


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_graph_is_tried_again(message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TOPO_SORT_CIRCLE_GRAPHS_1.ir").touch()
    prepared = []
    compile, calls = failing(message, 2)
    assert compile_again_if_unlucky(compile, lambda: prepared.append(None)) == 3
    assert len(calls) == 3 and len(prepared) == 2
    assert not list(tmp_path.iterdir())  # MindSpore's dump is gone
    assert "try 3 of" in "".join(capsys.readouterr())


@pytest.mark.parametrize("message", BROKEN)
def test_not_for_ever(message):
    compile, calls = failing(message, 99)
    with pytest.raises(RuntimeError, match=r"cnode|cycle"):
        compile_again_if_unlucky(compile)
    assert len(calls) == TRIES


def test_what_is_wrong_with_the_network_is_told_at_once():
    compile, calls = failing("For primitive[MatMul], the shapes do not fit: 2 out of range", 99)
    with pytest.raises(RuntimeError, match="do not fit"):
        compile_again_if_unlucky(compile)
    assert len(calls) == 1
