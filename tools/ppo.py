# SPDX-License-Identifier: Apache-2.0
"""`sporeloom ppo`."""

from sporeloom.cli.ppo import main
from sporeloom.core.errors import run_tool

if __name__ == "__main__":
    run_tool(main)
