# SPDX-License-Identifier: Apache-2.0
"""`sporeloom kto`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.kto import main

if __name__ == "__main__":
    run_tool(main)
