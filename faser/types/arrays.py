"""Types of NumPy arrays, named once, and the token id that stands for none."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

NO_TOKEN = -1  # an entry of token ids without a token
