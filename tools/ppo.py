# SPDX-License-Identifier: Apache-2.0
"""`mindloom ppo`."""

from mindloom.errors import run_tool
from mindloom.verbs.ppo import main

if __name__ == "__main__":
    run_tool(main)
