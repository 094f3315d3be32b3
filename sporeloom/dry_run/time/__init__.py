# SPDX-License-Identifier: Apache-2.0
"""The time of a step, from the cost of every operator in the graphs of every stage."""
