# SPDX-License-Identifier: Apache-2.0
"""Calls of compiled kernels with NumPy arrays."""

import ctypes


def calling(library):
    """Calls a kernel with arrays, the last of them its output."""

    def run(name, *arrays):
        count = len(arrays)
        data = (ctypes.c_void_p * count)(*(array.ctypes.data for array in arrays))
        dims = (ctypes.c_int * count)(*(array.ndim for array in arrays))
        rows = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
        shapes = (ctypes.POINTER(ctypes.c_int64) * count)(*rows)
        types = (ctypes.c_char_p * count)(*(array.dtype.name.encode() for array in arrays))
        assert getattr(library, name)(count, data, dims, shapes, types, None, None) == 0

    return run
