"""FASER on Ray. Most tests need the package, which `make ray` installs; that of a cluster runs with --full."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")  # Ray's own code warns when it is imported
    import ray.data
    import ray.serve  # noqa: F401
