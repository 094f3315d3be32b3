# SPDX-License-Identifier: Apache-2.0
"""Tasks that the lm-evaluation-harness lacks, in its format: YAML files that read published files from `data/`."""
