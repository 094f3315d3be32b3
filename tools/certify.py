# SPDX-License-Identifier: Apache-2.0
"""`mindloom certify`."""

from mindloom.errors import run_tool
from mindloom.verbs.certify import main

if __name__ == "__main__":
    run_tool(main)
