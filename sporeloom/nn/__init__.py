# SPDX-License-Identifier: Apache-2.0
"""Model parts written for one device. Every operator whose layout can matter is a named primitive attribute."""
