# SPDX-License-Identifier: Apache-2.0
"""`mindloom grpo`."""

from mindloom.errors import run_tool
from mindloom.verbs.grpo import main

if __name__ == "__main__":
    run_tool(main)
