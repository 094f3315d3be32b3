# SPDX-License-Identifier: Apache-2.0
"""`mindloom serve`."""

from mindloom.errors import run_tool
from mindloom.verbs.serve import main

if __name__ == "__main__":
    run_tool(main)
