# SPDX-License-Identifier: Apache-2.0
"""`mindloom checkpoint-info`."""

from mindloom.errors import run_tool
from mindloom.verbs.checkpoint_info import main

if __name__ == "__main__":
    run_tool(main)
