#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Debian's packages for what HumanEval-X runs besides Python, and an allocator that makes the tests' compilations faster;
# installs what is missing. Needs root.
set -euo pipefail
missing=()
need() { [ -e "$1" ] || command -v "$1" > /dev/null || missing+=("${@:2}"); }
need g++ g++
need /usr/include/boost/any.hpp libboost-dev
need /usr/include/openssl/md5.h libssl-dev
need javac default-jdk-headless
need node nodejs
need npm npm
need go golang-go
need /usr/share/gocode/src/github.com/stretchr/testify golang-github-stretchr-testify-dev
need rustc rustc
need cargo cargo
need /usr/share/cargo/registry/rand-0.8.5 librust-rand-dev
need /usr/share/cargo/registry/regex-1.7.1 librust-regex+default-dev
need /usr/share/cargo/registry/md5-0.7.0 librust-md5-dev
[[ "$(ldconfig -p)" == *libjemalloc* ]] || missing+=(libjemalloc2)
[ ${#missing[@]} -eq 0 ] && exit 0
echo "installing ${missing[*]}"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
