#!/bin/sh
# Prints a Python that MindSpore has wheels for (3.10 to 3.12), or says what is missing.
for python in python3 python3.12 python3.11 python3.10; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        echo "$python"
        exit 0
    fi
done
echo "error: Python 3.10, 3.11 or 3.12 with venv is needed and none is on the PATH" >&2
exit 1
