# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that run what a model wrote: problems, prompts, isolated execution, scores."""
