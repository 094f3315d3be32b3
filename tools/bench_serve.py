# SPDX-License-Identifier: Apache-2.0
"""`mindloom bench-serve`."""

from mindloom.errors import run_tool
from mindloom.verbs.bench_serve import main

if __name__ == "__main__":
    run_tool(main)
