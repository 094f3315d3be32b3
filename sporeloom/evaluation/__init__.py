# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that run generated programs: problems, prompts, isolated execution, scores."""
