# SPDX-License-Identifier: Apache-2.0
"""Search strategies beyond the planner's grid: closed form, simulation, certificates, Pareto front."""
