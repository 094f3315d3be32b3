# SPDX-License-Identifier: Apache-2.0
"""`sporeloom checkpoint-info`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.checkpoint_info import main

if __name__ == "__main__":
    run_tool(main)
