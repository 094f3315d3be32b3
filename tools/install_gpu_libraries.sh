#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What MindSpore's CUDA 11 plugin loads besides NVIDIA's driver, from PyPI, into the environment of `python`. Prints the lines
# that make it known: eval "$(tools/install_gpu_libraries.sh)"
set -euo pipefail
python -m pip install --quiet \
  nvidia-cuda-runtime-cu11 nvidia-cuda-nvrtc-cu11 nvidia-cublas-cu11 'nvidia-cudnn-cu11>=8,<9' nvidia-cufft-cu11 \
  nvidia-curand-cu11 nvidia-cusolver-cu11 nvidia-cusparse-cu11 >&2
python - <<'END'
import importlib.metadata
import pathlib
import sysconfig

nvidia = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
folders = sorted(map(str, nvidia.glob("*/lib")))
# MindSpore asks $CUDA_HOME/bin/nvcc which CUDA there is, and loads no plugin without an answer. PyPI has no nvcc of CUDA 11:
# this one says the version of the libraries, and does nothing else.
major, minor, build = importlib.metadata.version("nvidia-cuda-runtime-cu11").split(".")[:3]
nvcc = nvidia / "mindspore_cuda" / "bin" / "nvcc"
nvcc.parent.mkdir(parents=True, exist_ok=True)
nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {major}.{minor}, V{major}.{minor}.{build}"\n')
nvcc.chmod(0o755)
print(f'export CUDA_HOME="{nvcc.parent.parent}"')
print(f'export LD_LIBRARY_PATH="{":".join(folders)}:${{LD_LIBRARY_PATH:-}}"')
END
