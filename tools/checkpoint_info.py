# SPDX-License-Identifier: Apache-2.0
"""`sporeloom checkpoint-info`."""

from sporeloom.cli.checkpoint_info import main
from sporeloom.core.errors import run_tool

if __name__ == "__main__":
    run_tool(main)
