"""The folder of other clients, which make clients installs."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest) -> Path:
    """Folder of the clients; without one the tests that need it are skipped."""
    folder: str | None = request.config.getoption("--clients")
    if folder is None:
        pytest.skip("make clients installs the clients and runs this")
    return Path(folder).absolute()
