"""What do the derivatives of a small network cost, relative to the network itself?

    python benchmarks/pushing_and_pulling.py

builds the graphs of the chapter "Pushing and pulling", compiles them in PyTensor's default mode
(minutes with empty caches), and times them in turns for square matrices of 8 to 512 rows. It writes
results/pushing_and_pulling.json, which the chapter draws.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.gradient import (
    grad,
    hessian,
    hessian_vector_product,
    jacobian,
    pullback,
    pushforward,
)

from helpers.timing import compare, machine, write_record

RECORD = Path(__file__).parent / "results" / "pushing_and_pulling.json"
SIZES = (8, 16, 32, 64, 128, 256, 512)
SECONDS = 5.0  # for each size

x, v, u = pt.dvectors("x", "v", "u")
A, B = pytensor.shared(np.eye(2), name="A"), pytensor.shared(np.eye(2), name="B")
y = pt.tanh(pt.dot(A, pt.tanh(pt.dot(B, x))))
cost = (y**2).sum() / 2
GRAPHS = {
    "f": ([x], y),
    "push": ([x, v], pushforward(y, x, v)),
    "pull": ([x, u], pullback(y, x, u)),
    "Jacobian, loop": ([x], jacobian(y, x)),
    "Jacobian, vectorised": ([x], jacobian(y, x, vectorize=True)),
    "gradient": ([x], grad(cost, x)),
    "Hessian times vector": ([x, v], hessian_vector_product(cost, x, v)),
    "Hessian": ([x], hessian(cost, x)),
}


if __name__ == "__main__":
    rng = np.random.default_rng(2017)
    functions = {name: pytensor.function(*graph) for name, graph in GRAPHS.items()}
    linker = type(functions["f"].maker.linker).__name__
    record = {"machine": machine(), "linker": linker, "timings": {}}
    for size in SIZES:
        for weights in (A, B):
            weights.set_value(rng.standard_normal((size, size)) / np.sqrt(size))
        at = rng.standard_normal(size)
        contenders = {
            name: partial(f, *[at] * len(GRAPHS[name][0])) for name, f in functions.items()
        }
        times = compare(contenders, seconds=SECONDS, label=f"n = {size}")
        record["timings"][str(size)] = {
            # Four digits are more than a clock gives, and keep the record small.
            "seconds": {k: [float(f"{s:.3e}") for s in t] for k, t in times.seconds.items()},
            "label": times.label,
            "date": times.date,
        }
        print(f"\nn = {size}\n\n{times.table('f')}", flush=True)
    write_record(record, RECORD)
