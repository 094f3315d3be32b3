# SPDX-License-Identifier: Apache-2.0
"""Parameters of the Cells, made from what the parts of a model declare of them."""

from mindspore import Parameter
from mindspore import dtype as mstype
from mindspore.common.initializer import (
    Constant,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
    Zero,
    initializer,
)

from sporeloom.models.parts.spec import InitialValue, ParameterSpec

INITIALIZERS = {"constant": Constant, "normal": Normal, "truncated_normal": TruncatedNormal, "uniform": Uniform}


def declared_parameter(spec: ParameterSpec, **settings: bool) -> Parameter:
    """Create the float32 parameter that `spec` declares, with its initial value. `settings`: of `mindspore.Parameter`.

    Random values come from NumPy's generator in the order of these calls.
    """
    return Parameter(initializer(_initializer(spec.init), spec.shape, mstype.float32), **settings)


def _initializer(init: InitialValue) -> Initializer:
    if init.kind == "constant" and init.value == 0:
        return Zero()  # its memory is taken only when it is written
    return INITIALIZERS[init.kind](init.value)
