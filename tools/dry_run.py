# SPDX-License-Identifier: Apache-2.0
"""`sporeloom dry-run`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.dry_run import main

if __name__ == "__main__":
    run_tool(main)
