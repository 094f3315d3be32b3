# SPDX-License-Identifier: Apache-2.0
"""The standard terms of the field: the tables hold the banned words, and what to write instead."""

import ast
import dataclasses
import io
import re
import tokenize
from functools import cache

import pytest
from conftest import ROOT

from sporeloom.core.command_line import option, parse_args

TERMS = {
    r"told|tells?|telling": "report, log, print, broadcast, show, inform",
    r"says? of": "report",
    r"log rank": "logging rank",
    r"held against|holds? (it|them) against": "compared with, validated against, checked against",
    r"networks? of (one|your|the user|their)('s)? own|(one's|your) own networks?": "custom network",
    r"ways? out": "suggested fix",
    r"kept[ -]graphs?": "compilation cache",
    r"gathered twice": "resharded after forward (ZeRO-3 / FSDP)",
    r"cop(y|ies) of (a )?microbatch(es)?": "interleaved microbatches",
    r"deals? out|dealt( out)?|shared? out|shares out|sharing out": "assign, distribute, shard",
    r"ours|theirs": "local, reference; this package's, the other project's",
    r"mine": "this rank's",
    r"word (embeddings?|table)|table of words": "token embedding",
    r"balance loss(es)?": "load-balancing loss",
    r"likeness(es)?": "scaled-down model",
    r"passed over": "skipped",
    r"work(s|ed)? through": "prefill, compute",
    r"undrawn": "deferred initialization",
    r"shipped": "built-in",
    r"vouch(es|ed|ing)?": "prove, cover",
    r"foresees?|foreseen": "predicted",
    r"(hangs?|hung) on": "depend on",
    r"(?<!there )(is|are) no(?! longer| more)": "is not a",
    r"(compute|computed|computes) (again|twice)|computed anew": "recompute",
    r"beside": "next to, besides, auxiliary",
    r"whole (batch|tensors?|matri(x|ces)|model|state|weights?|sequences?)": "full, global, unsharded",
    r"taught": "trained",
    r"wants?|wanted": "needs, expects, requested",
    r"ask(s|ed)? for": "request, given",
    r"go(es|ing)? on": "continue",
    r"how likely": "log-probability, probability",
    r"likelier|likeliest": "more likely, most likely",
    r"at work": "running, temporary",
    r"that are none": "invalid",
    r"not built|built here": "not supported, not implemented",
    r"for people": "for messages, for reports",
}
"""Words and phrases of texts -> what to write instead."""
ANY_TERM = re.compile(rf"(?<![\w-])(?:{'|'.join(TERMS)})(?![\w-])", re.IGNORECASE)
LITERAL = re.compile(r"`[^`\n]*`|--(to|from) ours|\bmine\.yaml|state\.beside")
"""Names of flags, fields and files in texts, which stay as they are."""

FRAGMENTS = ("As", "By", "How", "Likewise", "Of", "That", "Those", "What", "When", "Where", "Which", "Whose")
"""Words that no docstring begins with: a definition or a sentence in the imperative can be read without the code."""

IDENTIFIERS = {
    r"(MOST|LARGEST|DEEPEST)(_\w+)?": "MAX_...",
    r"(LEAST|FEWEST)(_\w+)?": "MIN_...",
    r"Asked|Wanted|Texts|CompletionAsked|ChatAsked": "CompletionRequest, GenerationRequest, RequestStream",
    r"OneNormLayer": "ParallelBlock",
    r"Choices|HashChoices|Scores|Places": "TopKRouter, HashRouter, Router, DispatchIndices",
    r"Signed|Drawn|Prefetched|Fitted|Shuffled|Measured|Rewritten|Parsed|Raw": "a noun",
    r"Encoded|Described|Stored|Timed|Prepared": "a noun",
    r"Collected|Sampled|Kept|Given|Lost|Published|Cached|Uncached|Mixed|Failed|Asking|AskedKeys|Upcycling": "a noun",
    r"\w*likeness\w*": "scaled_down",
    r"\w*vouch\w*": "covered",
    r"models_beside": "auxiliary_bytes",
}
"""Names of classes, functions and constants -> what to write instead."""


def files(*folders, kind="*.py"):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob(kind))]


PRODUCT = files("sporeloom", "pangu", "codegeex", "palm", "tools")


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(path):
    for node in ast.walk(tree(path)):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def texts(path):
    """(line, text) of docstrings, messages and comments; of formatted strings without their expressions."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 1:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def banned(found):
    for line, text in found:
        for match in ANY_TERM.finditer(LITERAL.sub("", text)):
            instead = next(say for term, say in TERMS.items() if re.search(term, match[0], re.IGNORECASE))
            yield f"{line}: {match[0]!r}: write {instead}"


def problems(paths, check):
    return [f"{path.relative_to(ROOT)}:{problem}" for path in paths for problem in check(path)]


def test_texts_use_the_terms_of_the_field():
    assert not problems(PRODUCT, lambda path: banned(texts(path)))


def test_comments_of_configurations_use_the_terms_of_the_field():
    def comments(path):
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return banned((number, line[line.index("#") :]) for number, line in lines if "#" in line)

    assert not problems(files("parallel_configs", "sporeloom", kind="*.yaml"), comments)


def test_a_docstring_is_a_definition_or_a_sentence_and_no_fragment():
    def fragments(path):
        starts = [(line, text.split()[0].rstrip(",:")) for line, text in docstrings(path) if text.split()]
        return [f"{line}: begins with {word!r}" for line, word in starts if word in FRAGMENTS]

    assert not problems(PRODUCT, fragments)


def test_names_are_nouns_and_standard_terms():
    def private(path):
        nodes = [node for node in ast.walk(tree(path)) if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Name))]
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names = stored.union(node.name for node in nodes if not isinstance(node, ast.Name))
        found = [(name, term) for name in sorted(names) for term in IDENTIFIERS if re.fullmatch(term, name)]
        return [f" {name}: write {IDENTIFIERS[term]}" for name, term in found]

    assert not problems(PRODUCT, private)


def flags():
    """(place, name, default, help) of every flag that a class declares by `option` or `output`."""
    for path in PRODUCT:
        for node in ast.walk(tree(path)):
            call = node.value if isinstance(node, ast.AnnAssign) else None
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("option", "output", "argument"):
                *default, text = call.args
                yield f"{path.name}:{node.lineno}", node.target.id, default[0] if default else None, ast.unparse(text)


def test_the_help_of_a_flag_stands_alone_and_gives_its_default():
    """The command line appends `(default: VALUE)` by itself, but for None, (), False and flags that are required."""
    found, wrong = list(flags()), []
    for place, name, default, text in found:
        is_absent = default is not None and ast.unparse(default) in ("None", "()")
        if re.match(r"f?['\"](of|what|how|as|those|and|on|so|which|whether|likewise|anew)\b", text):
            wrong.append(f"{place}: {name}: {text} is a fragment")
        if is_absent != ("(default: " in text):
            wrong.append(f"{place}: {name}: {text} {'does not give' if is_absent else 'repeats'} the default")
    assert len(found) > 250
    assert not wrong


def test_help_has_one_placeholder_for_each_type_and_shows_a_default_of_zero(capsys):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Numbers:
        seed: int = option(0, "random seed of the samples")
        rate: float = option(0.0, "dropout rate")
        fast: bool = option(False, "skip what is slow")

    with pytest.raises(SystemExit):
        parse_args(Numbers, "", ["-h"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--seed N random seed of the samples (default: 0)" in said
    assert "--rate X dropout rate (default: 0.0)" in said
    assert said.endswith("--fast skip what is slow")
