# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the version of MindSpore or on names that it does not promise to keep."""
