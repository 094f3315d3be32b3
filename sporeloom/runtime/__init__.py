# SPDX-License-Identifier: Apache-2.0
"""Runs parallel networks on devices and CPU processes behind one interface."""
