# SPDX-License-Identifier: Apache-2.0
"""`sporeloom reshard-checkpoint`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.reshard_checkpoint import main

if __name__ == "__main__":
    run_tool(main)
