# SPDX-License-Identifier: Apache-2.0
"""`mindloom kept-graphs`."""

from mindloom.errors import run_tool
from mindloom.verbs.kept_graphs import main

if __name__ == "__main__":
    run_tool(main)
