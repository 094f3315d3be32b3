# SPDX-License-Identifier: Apache-2.0
"""Measure throughput and latency of a server with OpenAI's API, in vLLM's metrics: TTFT, TPOT, ITL, goodput.

sporeloom bench-serve --base-url http://127.0.0.1:8000 --num-prompts 64 --request-rate 4
"""

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec

from sporeloom.core.command_line import check_numbers, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text


def main(argv: Sequence[str]) -> int:
    if find_spec("httpx") is None:
        raise ConfigError("httpx missing: pip install -e '.[serve]'")
    from sporeloom.serve.bench import BenchServeConfig, bench  # noqa: PLC0415 (needs httpx)

    config = parse_args(BenchServeConfig, __doc__, argv)
    check_numbers(config)
    told = asyncio.run(bench(config))
    if config.save_result:
        write_text_atomically(config.save_result, json_text(told, indent=1))
    for name, value in told.items():
        print(f"{name:24} {value:,.2f}" if isinstance(value, float) else f"{name:24} {value}")
    return 1 if told["failed"] else 0
