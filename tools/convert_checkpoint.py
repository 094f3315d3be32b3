# SPDX-License-Identifier: Apache-2.0
"""`mindloom convert-checkpoint`."""

from mindloom.errors import run_tool
from mindloom.verbs.convert_checkpoint import main

if __name__ == "__main__":
    run_tool(main)
