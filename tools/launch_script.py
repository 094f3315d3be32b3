# SPDX-License-Identifier: Apache-2.0
"""`sporeloom launch-script`."""

from sporeloom.errors import run_tool
from sporeloom.verbs.launch_script import main

if __name__ == "__main__":
    run_tool(main)
