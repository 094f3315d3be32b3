# SPDX-License-Identifier: Apache-2.0
"""Answers to requests of all kinds are the same alone, together, with drafts and on a mesh.

benchmarks/determinism.py does the same at length.
"""

import importlib

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

NUM_REQUESTS = 12
NGRAM = ("--speculate", "ngram", "--num-speculative-tokens", 2)


@pytest.fixture(scope="module")
def suite():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("determinism")


@pytest.fixture(scope="module")
def folder(suite, tmp_path_factory):
    suite.build(folder := tmp_path_factory.mktemp("served"), num_layers=1)
    return folder


def test_answers_do_not_depend_on_company_drafts_or_mesh(suite, folder):
    """One device, whose answers are exact; then two ranks, also with adapters."""
    flags = ("--embeddings", "last", "--prefill-chunk", 16, "--max-num-seqs", 3)  # few graphs
    requests = list(suite.mixed(NUM_REQUESTS))
    with suite.serving(folder / "town", *flags, *NGRAM) as server:
        alone = suite.alone(server.url, requests)
        assert suite.different(suite.together(server.url, requests), alone) == ([], 0.0)
        assert server.metric("spec_decode_num_accepted_tokens_total") > 0
        assert server.metric("prefix_cache_hits_total") > 0
    assert len({str(answer) for answer in alone}) == NUM_REQUESTS
    flags += ("--strategy", suite.TP2, "--launch", "--lora-modules", f"poet={folder / 'poet'}")
    flags += NGRAM
    adapted = [(path, {**body, "model": "poet"}) for path, body in requests[:4]]
    with suite.serving(folder / "town", *flags) as mesh:
        found = suite.together(mesh.url, requests + adapted)
        wrong, largest = suite.different(found[:NUM_REQUESTS], alone, suite.TOLERANCE)
        assert not wrong and largest > 0, [requests[number] for number in wrong]
        assert suite.different(suite.alone(mesh.url, adapted), found[NUM_REQUESTS:]) == ([], 0.0)
        changed = [one != other for one, other in zip(found, found[NUM_REQUESTS:], strict=False)]
        assert sum(changed) >= 2, changed  # by so small an adapter not each short text is another


def test_so_do_answers_of_quantized_models(suite, folder):
    """Tools, schemas, drafts, prefix cache and embeddings: a request of each kind."""
    flags = (
        "--embeddings",
        "last",
        "--prefill-chunk",
        16,
        "--max-num-seqs",
        3,
        "--weights",
        "w8a8",
        "--kv-cache",
        "int8",
    )
    requests = list(suite.mixed(10))
    with suite.serving(folder / "town", *flags, *NGRAM) as server:
        alone = suite.alone(server.url, requests)
        assert suite.different(suite.together(server.url, requests), alone) == ([], 0.0)
        assert server.metric("spec_decode_num_accepted_tokens_total") > 0


def test_the_comparison_finds_what_differs(suite):
    base = [("a", [0.5, 1.0]), (["b"], [])]
    assert suite.different(base, base) == ([], 0.0)
    assert suite.different([("a", [0.5, 1.0 + 2e-5]), (["c"], [])], base, suite.TOLERANCE)[0] == [0, 1]
    assert suite.different([("a", [0.5]), (["b"], [0.1])], base, 1.0)[0] == [0, 1]
    assert suite.different([("a", [0.5, float("nan")]), (["b"], [])], base, 1.0)[0] == [0]
