# SPDX-License-Identifier: Apache-2.0
"""`sporeloom audit`."""

from sporeloom.cli.audit import main
from sporeloom.core.errors import run_tool

if __name__ == "__main__":
    run_tool(main)
