"""Tests of the library. A worker has one core: threads of PyTorch and BLAS that wait for each other would only spin.

They read this when they are loaded, and the processes that tests start inherit it.
"""

import os

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")
