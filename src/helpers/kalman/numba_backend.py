"""What PyTensor's Numba backend offers to Ops, imported once its folder can be written.

PyTensor makes the folder when the backend is imported, and fails where it cannot.
"""

from helpers.kalman.on_disk import for_pytensor

for_pytensor()

from pytensor.link.numba.cache import compile_numba_function_src  # noqa: E402, F401
from pytensor.link.numba.dispatch.basic import (  # noqa: E402, F401
    numba_njit,
    register_funcify_and_cache_key,
    register_funcify_default_op_cache_key,
)
