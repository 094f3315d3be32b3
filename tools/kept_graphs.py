# SPDX-License-Identifier: Apache-2.0
"""`sporeloom kept-graphs`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.kept_graphs import main

if __name__ == "__main__":
    run_tool(main)
