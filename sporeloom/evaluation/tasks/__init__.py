# SPDX-License-Identifier: Apache-2.0
"""Tasks that the lm-evaluation-harness lacks, as it has them: YAML files that read published files from `data/`."""
