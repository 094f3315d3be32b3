# SPDX-License-Identifier: Apache-2.0
"""Models without MindSpore: configuration, parameters, and the names of weights in other projects."""
