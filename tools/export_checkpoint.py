# SPDX-License-Identifier: Apache-2.0
"""`mindloom export-checkpoint`."""

from mindloom.errors import run_tool
from mindloom.verbs.export_checkpoint import main

if __name__ == "__main__":
    run_tool(main)
