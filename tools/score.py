# SPDX-License-Identifier: Apache-2.0
"""`sporeloom score`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.score import main

if __name__ == "__main__":
    run_tool(main)
