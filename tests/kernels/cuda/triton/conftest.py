"""What the interpreter needs in order to be as quiet as a GPU."""

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def quiet_overflow() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns where a GPU gives infinity or no number, as it should."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield
