# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server on any mesh. Needs the extra `serve`."""
