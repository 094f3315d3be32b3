# SPDX-License-Identifier: Apache-2.0
"""`mindloom dry-run`."""

from mindloom.errors import run_tool
from mindloom.verbs.dry_run import main

if __name__ == "__main__":
    run_tool(main)
