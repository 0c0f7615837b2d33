"""The Ops of `helpers.kalman.op` in Numba: thin functions around the compiled kernels."""

from hashlib import sha256

import numpy as np
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from helpers.kalman.model import STATIC
from helpers.kalman.op import (
    INPUTS,
    OUTPUTS,
    TOLERANCE,
    KalmanFilter,
    KalmanFilterGrad,
    KalmanLoglike,
    KalmanLoglikeGrad,
)


@numba_njit
def contiguous(x):
    """A copy as a contiguous float64 array, whatever the layout and type of x."""
    out = np.empty(x.shape)
    # Not `out[...] = x`: the error for shapes that differ takes Numba a second to compile.
    for i, value in np.ndenumerate(x):
        out[i] = value
    return out


@numba_njit
def over_time(x):
    """`contiguous`, with an axis of length 1 for time in front."""
    return contiguous(x).reshape((1, *x.shape))


@numba_njit
def check(y, a0, P0, c, d, T, Z, R, H, Q):
    """Raise where the sizes do not fit: a kernel would read what is not there."""
    n, p = y.shape
    m, r = a0.shape[0], R.shape[2]
    if n == 0 or p == 0 or m == 0 or r == 0:
        raise ValueError("y, a0 or R is empty")
    for X in (c, d):
        if X.shape[0] != 1 and X.shape[0] != n:
            raise ValueError("c or d varies over time, but not over as many steps as y has")
    for X in (T, Z, R, H, Q):
        if X.shape[0] != 1 and X.shape[0] != n:
            raise ValueError("T, Z, R, H or Q varies over time, but not over as many steps as y")
    if P0.shape != (m, m):
        raise ValueError("P0 does not have shape (m, m), with m the length of a0")
    if c.shape[1] != m:
        raise ValueError("c does not have length m, the length of a0")
    if d.shape[1] != p:
        raise ValueError("d does not have length p, the number of columns of y")
    if T.shape[1:] != (m, m):
        raise ValueError("T does not have shape (m, m), with m the length of a0")
    if Z.shape[1:] != (p, m):
        raise ValueError("Z does not have shape (p, m): columns of y, length of a0")
    if R.shape[1] != m:
        raise ValueError("R does not have m rows, with m the length of a0")
    if H.shape[1:] != (p, p):
        raise ValueError("H does not have shape (p, p), with p the number of columns of y")
    if Q.shape[1:] != (r, r):
        raise ValueError("Q does not have shape (r, r), with r the number of columns of R")


def _compile(op, node, call: str, extra: str, results: list[str]):
    """A function of the Op's inputs that makes kernel arrays of them and returns `results`."""
    dtype = node.inputs[0].dtype
    prepare = [
        f"    {x} = {'contiguous' if x in ('y', *STATIC, *op.varying) else 'over_time'}({x})"
        for x in INPUTS
    ]
    cast = "" if dtype == "float64" else f".astype(np.{dtype})"
    returned = ", ".join(f"{x}{cast}" for x in results)
    name = type(op).__name__
    source = "\n".join(
        [
            f"def {name}({', '.join(INPUTS)}{extra}):",
            *prepare,
            f"    check({', '.join(INPUTS)})",
            f"    {call}",
            f"    return {returned}",
        ]
    )
    from helpers.kalman import (  # compiles the kernels, once for each machine
        compiled,
        general,
        kernels,
    )

    known = {
        "np": np, "contiguous": contiguous, "over_time": over_time, "check": check,
        "compiled": compiled, "general": general,
    }  # fmt: skip
    key = sha256(f"{source} {TOLERANCE} {kernels.digest()}".encode()).hexdigest()
    return numba_njit(compile_numba_function_src(source, name, global_env=known)), key


def _gradient(op, name: str) -> str:
    """The expression of the gradient of an input, among what the kernels return."""
    if name in ("l", "y"):
        return {"l": "l", "y": "y_bar"}[name]
    return f"out.{name}" if name in (*STATIC, *op.varying) else f"out.{name}[0]"


@register_funcify_and_cache_key(KalmanLoglike)
def numba_funcify_kalman_loglike(op, node, **kwargs):
    call = f"l = compiled.loglike({', '.join(INPUTS)}, {TOLERANCE})"
    return _compile(op, node, call, "", ["l"])


@register_funcify_and_cache_key(KalmanLoglikeGrad)
def numba_funcify_kalman_loglike_grad(op, node, **kwargs):
    flags = ", ".join(map(str, op.flags()))
    arguments = f"{', '.join(INPUTS)}, contiguous(l_bar), {flags}, {TOLERANCE}"
    call = f"l, out, y_bar, _ = compiled.loglike_and_grad({arguments})"
    return _compile(op, node, call, ", l_bar", [_gradient(op, x) for x in op.asked])


@register_funcify_and_cache_key(KalmanFilter)
def numba_funcify_kalman_filter(op, node, **kwargs):
    call = f"{', '.join(OUTPUTS)}, _, _, _ = general.filter_outputs({', '.join(INPUTS)})"
    return _compile(op, node, call, "", list(OUTPUTS))


@register_funcify_and_cache_key(KalmanFilterGrad)
def numba_funcify_kalman_filter_grad(op, node, **kwargs):
    bars = ", ".join(
        f"contiguous({x}_bar)" if x in op.given else f"np.zeros({(0,) * len(letters)})"
        for x, letters in OUTPUTS.items()
    )
    call = f"_, out, y_bar = general.reverse({', '.join(INPUTS)}, {bars})"
    extra = "".join(f", {x}_bar" for x in op.given)
    return _compile(op, node, call, extra, [_gradient(op, x) for x in INPUTS])
