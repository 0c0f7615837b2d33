"""The contenders of `benchmarks/kalman_peers.py`, a module for each package.

Each module has one function (or a few), which takes ``y (n, p)`` and a
:class:`helpers.kalman.StateSpace` and returns a function without arguments: the log-likelihood and
its gradients with respect to the named arrays, ``(value, {name: gradient})``, computed anew at each
call. The packages are imported inside, so that one that is missing harms no other.
`contenders` lists them all; `worker` is the process that each of them has to itself.
"""
