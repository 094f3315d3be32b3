# SPDX-License-Identifier: Apache-2.0
"""`sporeloom replay`."""

from sporeloom.cli.replay import main
from sporeloom.core.errors import run_tool

if __name__ == "__main__":
    run_tool(main)
