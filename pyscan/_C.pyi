"""Types of the compiled core."""

import numpy as np
from numpy.typing import NDArray

version: str
compiler: str
isa: str
best_isa: str

def reduce_into(
    address: int,
    dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    col_stride: int,
    sumsq: NDArray[np.float64],
    absmax: NDArray[np.float64],
    bad: NDArray[np.float64],
    *,
    block: int,
    first: int = 0,
    by_rows: bool = False,
    row_sumsq: NDArray[np.float64] | None = None,
    num_threads: int = 1,
    isa: str | None = None,
) -> None: ...
