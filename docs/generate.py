# SPDX-License-Identifier: Apache-2.0
"""Fills in what the reference pages have from the code: `python docs/generate.py`; with `--check` it only compares.

A page says where: between `<!-- generated: NAME -->` and `<!-- end -->` stands what the function NAME of SECTIONS returns.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sporeloom.cli import EXAMPLES, GROUPS  # noqa: E402
from sporeloom.core import command_line  # noqa: E402

MARKED = re.compile(r"(?s)(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)")
HIDDEN = "metadata={'hidden': True}"
"""What marks a field that no file says."""
PLAIN = {
    **dict.fromkeys(("Count", "Natural", "Depth"), "int"),
    **dict.fromkeys(("Positive", "NotNegative", "Rate", "Fraction"), "float"),
}
"""What numbers with bounds are called in the tables."""
SUBCOMMANDS = {
    "plan": ("", "validate", "serve"),
    "dry-run": ("", "explain"),
    "evaluate": ("humaneval-x", "lm-eval"),
    "config": ("diff",),
    "tokenizer": ("train", "stats"),
}
"""Verbs whose first word may choose among several commands; "" is the verb alone. Those of preprocess are its COMMANDS."""


def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def classes(*paths: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for path in paths for node in tree(path).body if isinstance(node, ast.ClassDef)}


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines)


def plain(text: str) -> str:
    """A text of the code as Markdown shows it: what stands in angle brackets would be taken for HTML."""
    return re.sub(r"<(?=[\w/])", "&lt;", " ".join(text.split())).replace("*", r"\*").replace("[", r"\[")


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, text) of each field that is followed by its text."""
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        default = ast.unparse(item.value) if item.value else ""
        if HIDDEN not in default and not item.target.id.startswith("_"):
            text = following.value.value if isinstance(following, ast.Expr) else ""
            kind = re.sub(r"\w+", lambda word: PLAIN.get(word[0], word[0]), ast.unparse(item.annotation))
            yield item.target.id, kind, "" if default.startswith("field(") else default, " ".join(str(text).split())


def fields_table(node: ast.ClassDef) -> str:
    """Keys, types, defaults and meanings of a dataclass, below its docstring."""
    rows = [
        (f"`{key}`", f"`{kind.replace(' | ', ' or ')}`", f"`{default}`" if default else "", text)
        for key, kind, default, text in fields(node)
    ]
    return f"{ast.get_docstring(node) or ''}\n\n{table(('key', 'type', 'default', 'meaning'), rows)}"


def strategy() -> str:
    shown = {
        "Strategy": "The file",
        "Mesh": "mesh",
        "Pipeline": "pipeline",
        "Stages": "pipeline.stages",
        "Recompute": "recompute",
        "Offload": "offload",
        "OptimizerParallel": "optimizer_parallel",
        "Rules": "rules",
    }
    found = classes("sporeloom/strategy/config.py", "sporeloom/strategy/mesh.py")
    return "\n".join(f"## {title}\n\n{fields_table(found[name])}" for name, title in shown.items())


def model_config() -> str:
    found = classes(
        "sporeloom/models/config.py",
        "sporeloom/models/rope_scaling.py",
        *(f"sporeloom/models/parts/{name}.py" for name in ("experts", "latent_attention", "indexer")),
    )
    shown = {
        "ModelConfig": "Fields of the model",
        "ExpertConfig": "Fields of `experts`",
        "RopeScaling": "Fields of `rope_scaling`",
        "LatentConfig": "Fields of `latent`",
        "IndexerConfig": "Fields of `indexer`",
    }
    return "\n".join(f"### {title}\n\n{fields_table(found[name])}" for name, title in shown.items())


def step_metrics() -> str:
    rows = [(f"`{key}`", text) for key, _, _, text in fields(classes("sporeloom/train/metrics.py")["StepMetrics"])]
    return table(("key", "meaning"), [row for row in rows if row[0] != "`more`"])


def server_metrics() -> str:
    """Names and texts of the Prometheus metrics that serve/metrics.py makes."""
    made = next(
        node for node in classes("sporeloom/serve/metrics.py")["Metrics"].body if isinstance(node, ast.FunctionDef)
    )
    rows = []
    for node in ast.walk(made):
        if isinstance(node, ast.Dict):
            pairs = [
                (key, value) for key, value in zip(node.keys, node.values, strict=True) if isinstance(value, ast.Tuple)
            ]
            rows += [(ast.literal_eval(key), "gauge", ast.literal_eval(value.elts[0])) for key, value in pairs if key]
        elif isinstance(node, ast.Call) and (kind := ast.unparse(node.func)) in (
            "Counter",
            "self._counter",
            "self._histogram",
        ):
            name = ast.unparse(node.args[0]).rpartition("}")[2].strip("'")
            rows.append((name, kind.rpartition("_")[2].lower(), ast.literal_eval(node.args[1])))
    total = {"counter": "_total"}
    return table(("metric", "kind", "meaning"), [(f"`sporeloom:{n}{total.get(k, '')}`", k, t) for n, k, t in rows])


def decoder_rules() -> str:
    text = (ROOT / "parallel_configs/rules/decoder.yaml").read_text(encoding="utf-8")
    return f"```yaml\n{text}```\n"


ENDPOINTS = {
    "/": "the chat page",
    "/health": "503 with the state while the model loads and compiles, then 200",
    "/live": "200 while the process works, also while it loads: for liveness probes",
    "/ready": "the same as `/health`: for readiness probes",
    "/metrics": "metrics for Prometheus (see [Metrics](metrics.md#of-a-server))",
    "/v1/models": "the checkpoint's model and its adapters",
    "/v1/models/{name}": "one of them",
    "/tokenizer_info": "class, vocabulary size and end token of the tokenizer, as in vLLM",
    "/tokenize": "token ids of a `prompt` or of `messages`, as in vLLM",
    "/detokenize": "text of token ids",
    "/v1/load_lora_adapter": "loads adapters of `--runtime-lora-folder` under a name, as in vLLM",
    "/v1/unload_lora_adapter": "removes them; requests that have begun keep them",
    "/v1/embeddings": "vectors of texts or of token ids, with `--embeddings`",
    "/rerank": "documents in the order of their similarity to a query, with `--embeddings`",
    "/v1/rerank": "the same",
    "/v2/rerank": "the same",
    "/v1/completions": "continuations of texts or of token ids",
    "/v1/chat/completions": "answers to a conversation; 400 for a base model without a chat template",
    "/v1/responses": "the same in the form of OpenAI's Responses API",
    "/v1/responses/{name}": "a stored response; `DELETE` forgets it",
    "/v1/messages": "the same in the form of Anthropic's Messages API",
    "/v1/messages/count_tokens": "number of tokens of the prompt that it would make",
}


def endpoints() -> str:
    """The routes of the server, each with its text."""
    build = next(
        n for n in tree("sporeloom/serve/app.py").body if isinstance(n, ast.FunctionDef) and n.name == "build_app"
    )
    routes = next(n.value for n in build.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "routes")
    found = [
        (method.value, path.value.replace(":path", "")) for path, _, method in (route.elts for route in routes.elts)
    ]
    assert {path for _, path in found} == ENDPOINTS.keys(), (
        "ENDPOINTS of docs/generate.py has other routes than the server"
    )
    return table(("endpoint", "answer"), [(f"`{method} {path}`", ENDPOINTS[path]) for method, path in found])


class FoundError(Exception):
    """The parser that a verb makes, before it reads anything."""


def parser_of(verb: str, sub: str) -> argparse.ArgumentParser:
    """The parser of a verb with all its flags."""
    module = __import__(f"sporeloom.cli.{verb.replace('-', '_')}", fromlist=["main"])
    make = command_line._parser

    def caught(kind: type, description: str, words: list[str]) -> argparse.ArgumentParser:
        raise FoundError(make(kind, description, [command_line.ALL_FLAGS]))

    command_line._parser = caught
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module.main([*([sub] if sub else []), command_line.ALL_FLAGS])
    except FoundError as found:
        return found.args[0]
    finally:
        command_line._parser = make
    raise AssertionError(f"{verb} {sub} reads no command line")


def flags(parser: argparse.ArgumentParser) -> str:
    """The flags of a parser, a table for each of its groups."""
    text = ""
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if action.dest in ("help", "==SUPPRESS==") or "--help-all" in action.option_strings:
                continue
            value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            name = " ".join([", ".join(action.option_strings), str(value)]).strip()
            more = " ..." if action.nargs in ("+", "*") else ""
            rows.append((f"`{name}{more}`", plain((action.help or "").replace("%%", "%"))))
        if rows:
            title = {"positional arguments": "arguments", "options": "other"}.get(group.title or "", group.title)
            text += f"**{str(title).capitalize()}**\n\n{table(('flag', 'meaning'), rows)}\n"
    return text


def commands() -> str:
    from sporeloom.cli.preprocess import COMMANDS  # noqa: PLC0415 # the others are found without loading a verb

    text = ""
    for group, verbs in GROUPS.items():
        text += f"## {group}\n\n```text\n{EXAMPLES[group]}\n```\n\n"
        for verb, summary in verbs.items():
            text += f"### sporeloom {verb}\n\n{summary}.\n\n"
            for sub in {**SUBCOMMANDS, "preprocess": tuple(COMMANDS)}.get(verb, ("",)):
                text += f"#### sporeloom {verb} {sub}\n\n" if sub else ""
                text += flags(parser_of(verb, sub))
    return text


def api() -> str:
    """Signature and docstring of everything that `sporeloom` exports."""
    homes = {
        alias.name: f"{node.module.replace('.', '/')}.py"
        for outer in tree("sporeloom/__init__.py").body
        if isinstance(outer, ast.If)
        for node in outer.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    text = ""
    for name, path in sorted(homes.items()):
        node = next(n for n in tree(path).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
        returns = f" -> {ast.unparse(node.returns)}" if isinstance(node, ast.FunctionDef) and node.returns else ""
        arguments = signature(node.args) if isinstance(node, ast.FunctionDef) else []
        shown = "".join(f"    {argument},\n" for argument in arguments)
        text += f"## {name}\n\n```python\n{name}({chr(10) + shown if shown else ''}){returns}\n```\n\n"
        text += f"{docstring(ast.get_docstring(node) or '')}\n"
    return text


def signature(arguments: ast.arguments) -> list[str]:
    """Each argument with its type and default, as it stands in the code."""

    def shown(argument: ast.arg, default: ast.expr | None) -> str:
        kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
        return argument.arg + kind + (f" = {ast.unparse(default)}" if default else "")

    places = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    found = [shown(*pair) for pair in zip(arguments.args, places, strict=True)]
    if arguments.kwonlyargs:
        found += ["*", *(shown(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))]
    return found + ([f"**{shown(arguments.kwarg, None)}"] if arguments.kwarg else [])


def docstring(text: str) -> str:
    """A Google-style docstring as Markdown: `Args` and `Raises` become lists."""
    lines: list[str] = []
    for line in text.splitlines():
        if line in ("Args:", "Returns:", "Raises:"):
            lines += [f"**{line[:-1]}**", ""]
        elif entry := re.fullmatch(r"    ([\w, ]+): (.*)", line):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append(f"  {line.strip()}" if line.startswith("     ") else line.strip())
    return "\n".join(lines) + "\n"


SECTIONS: dict[str, Callable[[], str]] = {
    "api": api,
    "commands": commands,
    "decoder-rules": decoder_rules,
    "endpoints": endpoints,
    "model-config": model_config,
    "server-metrics": server_metrics,
    "step-metrics": step_metrics,
    "strategy": strategy,
}


def filled(text: str) -> str:
    """A page with its generated sections made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{SECTIONS[found[2]]().strip()}\n\n{found[3]}", text)


def main(check: bool) -> int:
    stale = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        print(f"not what the code says: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
