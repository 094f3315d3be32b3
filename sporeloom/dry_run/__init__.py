# SPDX-License-Identifier: Apache-2.0
"""What any rank of any cluster would hold, send and compute, from MindSpore's own partition of the real graph."""
