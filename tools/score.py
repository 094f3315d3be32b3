# SPDX-License-Identifier: Apache-2.0
"""`mindloom score`."""

from mindloom.errors import run_tool
from mindloom.verbs.score import main

if __name__ == "__main__":
    run_tool(main)
