# SPDX-License-Identifier: Apache-2.0
"""`sporeloom dpo`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.dpo import main

if __name__ == "__main__":
    run_tool(main)
