# SPDX-License-Identifier: Apache-2.0
"""Two implementations that take turns in one run, each in a process of its own: noise hits both alike."""

import json
import os
import subprocess
import sys


class Worker:
    """A process of `script` that answers each line with a line of JSON; its first answer tells its version.

    `python`: the interpreter, where the implementation is installed elsewhere.
    """

    def __init__(self, script: str, name: str, python: str = sys.executable):
        self.process = subprocess.Popen(
            [python, script, "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOG_v": "3"},
        )
        self.version = self.answer()["version"]

    def answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        sys.exit(f"error: a worker of the benchmark ended with code {self.process.wait()}")

    def ask(self, question="go") -> dict:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


def serve(answer, version: str) -> None:
    """A worker's side: say the version, then answer every question."""
    print(json.dumps({"version": version}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
