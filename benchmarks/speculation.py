# SPDX-License-Identifier: Apache-2.0
"""Tokens/s of code edits with drafts from n-grams, from a draft model and without, and the time to the first token of a
prompt in the prefix cache, on one CPU process.

PanGu 350M's dims with random weights. A processor of logits makes each answer the edited file, so that the drafts are those
of real text and every step computes what it would for a trained model. The draft model, a tenth of the size, has random
weights, too: it computes every draft, then a fixed share of its tokens is replaced by those of the answer. All ways take
turns in one run.
Writes benchmarks/results/speculation.md. `python benchmarks/speculation.py`.
"""

import argparse
import copy
import os
import platform
import random
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
from decode import DIMS, Ours

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "speculation.md"
FILES = [ROOT / "sporeloom" / "inference" / name for name in ("cache.py", "stopping.py", "score.py", "compare.py")]
EDITS = {"cache.py": ("slots", "places"), "stopping.py": ("text", "words"), "score.py": ("logits", "scores")}
EDITS |= {"compare.py": ("def ", "async def ")}
DRAFT_DIMS = {"hidden_size": 384, "num_layers": 12, "num_heads": 6}
"""With the same vocabulary: 37 million weights, the model has 346."""
PROMPT_TOKENS, ANSWER_TOKENS, SLOTS, MOST = 320, 96, 512, 8


def edits() -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of each file: its beginning, and the same after one name in it was replaced by another."""
    from codegeex.tokenizer import CodeGeeXTokenizer, train_tokenizer  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(train_tokenizer([f.read_text() for f in (ROOT / "sporeloom").rglob("*.py")], 8000))
        tokenizer = CodeGeeXTokenizer(path)
    found = []
    for file in FILES:
        text, (old, new) = file.read_text(), EDITS[file.name]
        prompt = tokenizer.encode_text(text)[:PROMPT_TOKENS]
        head = tokenizer.encode_text(f"\nReplace {old} by {new}:\n")
        answer = tokenizer.encode_text(tokenizer.decode(prompt).replace(old, new))[:ANSWER_TOKENS]
        found.append(([*prompt, *head], answer))
    return found


class Bench:
    """One network; answers with drafts and without."""

    def __init__(self, ours: Ours, num_rows: int, weights: str):
        from sporeloom.inference.mixed import cached  # noqa: PLC0415

        self.engine, self.config, self.num_rows = ours.engine, ours.config, num_rows
        self.ours, self.weights = ours, weights
        net = ours.network((num_rows, SLOTS), weights)
        self.decoding = cached(self.engine, net, ours.config, num_rows, SLOTS, num_drafts=MOST)
        self.decoding.prepare([PROMPT_TOKENS], 1)

    def answers(self, pairs, speculation, cache=None):
        """(seconds to the first tokens, seconds of all further ones, tokens)."""
        from sporeloom.inference.requests import NewToken, Request  # noqa: PLC0415
        from sporeloom.inference.scheduler import Scheduler  # noqa: PLC0415

        scheduler = Scheduler(self.decoding, self.engine, cache, speculation)
        for prompt, answer in pairs:
            scheduler.submit(Request(prompt, len(answer), forced(answer), lambda tokens: False))
        start, first, told = time.perf_counter(), {}, {}
        while not scheduler.is_idle:
            for event in scheduler.step():
                assert isinstance(event, NewToken), event
                told.setdefault(event.request, []).append(event.token)
                first.setdefault(event.request, time.perf_counter())
        end, begun = time.perf_counter(), max(first.values())
        assert list(told.values()) == [answer for _, answer in pairs]
        for row in range(self.num_rows):
            self.decoding.trim(row, 0)
        return begun - start, end - begun


def forced(answer):
    """A sampler whose processor leaves the next token of the answer."""
    from sporeloom.inference.sampling import Sampler, SamplingConfig  # noqa: PLC0415

    def process(logits, history):
        logits[np.arange(len(logits)) != answer[len(history.generated)]] = -np.inf
        return logits

    return Sampler(SamplingConfig(), first=[process])


def draft_model(bench, pairs, agreement):
    """A function that makes a drafter with a small model, of whose tokens this share is the answer's."""
    from sporeloom.inference.draft_model import CATCH_UP, ModelDrafter  # noqa: PLC0415
    from sporeloom.inference.mixed import cached  # noqa: PLC0415

    small = copy.copy(bench.ours)
    small.config, small.weights = replace(bench.config, **DRAFT_DIMS), {}
    net, num_rows = small.network((bench.num_rows, SLOTS), bench.weights), bench.num_rows
    decoding = cached(bench.engine, net, small.config, num_rows, SLOTS, num_drafts=CATCH_UP - 1)
    full = {tuple(prompt): [*prompt, *answer] for prompt, answer in pairs}

    class Agreeing(ModelDrafter):
        """Replaces what the model says, once it has said it."""

        def _step(self, unread):
            found = super()._step(unread)
            for row in found:
                state = self._rows[row]
                text = next(text for prompt, text in full.items() if tuple(state.text[: len(prompt)]) == prompt)
                place = len(state.text) + len(state.ahead)
                agrees = random.Random(f"{text[:20]} {place}").random() < agreement
                found[row] = text[place] if agrees and place < len(text) else (found[row] + 1) % DIMS["vocab_size"]
            return found

    drafter = Agreeing(decoding)
    drafter.prepare()
    return lambda: drafter


def measure(bench, pairs, rounds, make_drafter):
    """Seconds of decoding without drafts and with, and the fraction of drafts that were right."""
    from sporeloom.inference.speculation import Speculation  # noqa: PLC0415

    num_rows, plain, drafted, right = bench.num_rows, [], [], []
    bench.answers([(prompt, answer[:20]) for prompt, answer in pairs[:num_rows]], None)  # kernels choose their threads
    for _ in range(rounds):
        for start in range(0, len(pairs), num_rows):
            some = pairs[start : start + num_rows]
            plain.append(bench.answers(some, None)[1])
            speculation = Speculation(make_drafter(), MOST)
            drafted.append(bench.answers(some, speculation)[1])
            right.append((speculation.drafted, speculation.accepted))
    return plain, drafted, right


def first_token(bench, pairs):
    """Milliseconds to the first token, cold and with the prompt in the prefix cache: its row has been used since."""
    from sporeloom.inference.cache import cache_bytes  # noqa: PLC0415
    from sporeloom.inference.prefix_cache import prefix_cache  # noqa: PLC0415

    cold, warm = [], []
    cache = prefix_cache(bench.decoding, cache_bytes(bench.config, 1, 1), 2**30)
    short = [(prompt, answer[:2]) for prompt, answer in pairs]
    for each in short:
        cold.append(bench.answers([each], None, cache)[0] * 1000)
    for each in short:
        warm.append(bench.answers([each], None, cache)[0] * 1000)
    return cold, warm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--weights", nargs="+", default=["int8", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--agreements", type=float, nargs="*", default=[0.6, 0.8])
    asked = parser.parse_args()
    from sporeloom.inference.speculation import NgramDrafter  # noqa: PLC0415

    ours, pairs, lines, caches = Ours(), edits(), [], []
    for weights in asked.weights:
        for num_rows in asked.rows:
            bench = Bench(ours, num_rows, weights)
            drafters = {"n-grams": NgramDrafter}
            for share in asked.agreements:
                drafters[f"a model, {share:.0%} as in the answer"] = draft_model(bench, pairs, share)
            for name, make_drafter in drafters.items():
                plain, drafted, right = measure(bench, pairs, asked.rounds, make_drafter)
                tokens = num_rows * (ANSWER_TOKENS - 1)
                ratios = [before / after for before, after in zip(plain, drafted, strict=True)]
                made, good = (sum(each) for each in zip(*right, strict=True))
                lines.append(
                    f"| {weights} | {num_rows} | {name} | {tokens / statistics.median(plain):.1f} | "
                    f"{tokens / statistics.median(drafted):.1f} | {statistics.median(ratios):.2f} "
                    f"({min(ratios):.2f} .. {max(ratios):.2f}) | {good / made:.2f} |"
                )
                print(lines[-1], flush=True)
            if num_rows == 1:
                cold, warm = first_token(bench, pairs)
                caches.append(f"| {weights} | {statistics.median(cold):.0f} | {statistics.median(warm):.0f} |")
                print(caches[-1], flush=True)
            write(ours, asked, lines, caches)


def write(ours, asked, lines, caches) -> None:
    RESULTS.write_text(
        "# Speculative decoding and the prefix cache\n\n"
        f"{date.today()}, {len(os.sched_getaffinity(0))} cores of {platform.machine()}, Python {platform.python_version()}, "
        f"{ours.version}; load before the end {os.getloadavg()[0]:.1f}. {DIMS}, random weights, compiled kernels. Prompts of "
        f"about {PROMPT_TOKENS} tokens of code; answers, which a processor of logits demands, are the first {ANSWER_TOKENS} "
        f"tokens of the same code after a name was replaced; drafts of up to {MOST} tokens from n-grams, or from a model of "
        f"{DRAFT_DIMS} with random weights, of whose tokens a fixed share is replaced by those of the answer: its cost is "
        f"measured, its accuracy is given. Each next to no drafts in {asked.rounds} rounds of turns: read the ratios. "
        f"`python benchmarks/speculation.py --rounds {asked.rounds}`\n\n"
        "| weights | sequences | drafts by | tokens/s | with drafts | ratio (by turn) | drafted tokens that were right |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        "Time to the first token of a prompt, alone:\n\n"
        "| weights | cold, ms | in the prefix cache, ms |\n|---|---|---|\n" + "\n".join(caches) + "\n"
    )


if __name__ == "__main__":
    main()
