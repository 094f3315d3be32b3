# SPDX-License-Identifier: Apache-2.0
"""`sporeloom config`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.config import main

if __name__ == "__main__":
    run_tool(main)
