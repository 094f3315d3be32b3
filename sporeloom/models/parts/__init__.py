# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder, a module each: its settings, its parameters, what it computes, keeps and caches, and its published
names. `models/parameters.py` and the planner add them up; the Cells in `sporeloom.nn` compute with them."""
