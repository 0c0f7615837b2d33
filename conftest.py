"""Settings of every test run, so that plain `pytest --nbval` does what `make test` does."""

import os

# More BLAS threads change the last digits of a result. The kernels that nbval starts inherit these.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
