#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What MindSpore's CUDA 11 plugin loads besides NVIDIA's driver, from PyPI, into the environment of `python`. Prints the line
# that makes it known: eval "$(tools/install_gpu_libraries.sh)"
set -euo pipefail
python -m pip install --quiet \
  nvidia-cuda-runtime-cu11 nvidia-cuda-nvrtc-cu11 nvidia-cublas-cu11 'nvidia-cudnn-cu11>=8,<9' nvidia-cufft-cu11 \
  nvidia-curand-cu11 nvidia-cusolver-cu11 nvidia-cusparse-cu11 >&2
python - <<'END'
import pathlib
import sysconfig

folders = sorted(map(str, (pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia").glob("*/lib")))
print(f'export LD_LIBRARY_PATH="{":".join(folders)}:${{LD_LIBRARY_PATH:-}}"')
END
