# SPDX-License-Identifier: Apache-2.0
"""`sporeloom batch`."""

from sporeloom.cli.batch import main
from sporeloom.core.errors import run_tool

if __name__ == "__main__":
    run_tool(main)
