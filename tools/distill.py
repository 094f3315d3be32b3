# SPDX-License-Identifier: Apache-2.0
"""`sporeloom distill`."""

from sporeloom.cli.distill import main
from sporeloom.core.errors import run_tool

if __name__ == "__main__":
    run_tool(main)
