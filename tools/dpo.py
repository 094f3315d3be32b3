# SPDX-License-Identifier: Apache-2.0
"""`mindloom dpo`."""

from mindloom.errors import run_tool
from mindloom.verbs.dpo import main

if __name__ == "__main__":
    run_tool(main)
