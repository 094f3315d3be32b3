# SPDX-License-Identifier: Apache-2.0
"""Modules that know neither a model nor a mesh: errors, files, the strict reader, locks, processes, command lines."""
