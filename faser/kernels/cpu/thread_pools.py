"""The threads of the C++ kernels: one pool of all threads, and one pool for every set of cores in use.

Creates pools at first use, keeps a few, and ends them with the last backend that holds them. Runs no work itself.
"""

import ctypes
import os
import weakref

import numpy as np

from faser.errors import ConfigError

_MOST_LANES = 8  # pools of pinned threads to keep: both lanes of three shares, and two to spare


class NativePool:
    """A pool of threads. address: of its C++ Pool, which this object frees."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int, library: ctypes.CDLL) -> None:
        self.address = address
        weakref.finalize(self, _free, library, address, os.getpid())


class LanePools:
    """The pools of one backend, one of them in use. full: unpinned threads; other backends may share it.

    usable: the cores of this process.
    """

    def __init__(self, library: ctypes.CDLL, full: NativePool, usable: frozenset[int]) -> None:
        self._library = library
        self._full = full
        self._lanes: dict[tuple[int, ...], NativePool] = {}
        self._using = full
        self._usable = usable

    def use(self, cores: tuple[int, ...] | None) -> int:
        """Switch to the pool of these cores (None: the full pool) and return its address.

        The threads of the previous pool stop spinning at once. Raises ConfigError for cores that this process
        cannot use.
        """
        pool = self._full if cores is None else self._lanes.get(cores) or self._new(cores)
        if pool is not self._using:
            self._library.faser_pool_rest(self._using.address)
            self._using = pool
        return pool.address

    def _new(self, cores: tuple[int, ...]) -> NativePool:
        if not cores or len(set(cores)) < len(cores) or not self._usable.issuperset(cores):
            raise ConfigError(
                f"a lane's cores are {list(cores)}; they must be distinct, at least one, and among the usable "
                f"ones, {sorted(self._usable)}"
            )
        numbers = np.asarray(cores, dtype=np.int32)
        address = self._library.faser_pool_on(numbers.ctypes.data, len(numbers))
        if not address:
            raise ConfigError(f"the system does not put threads on the cores {list(cores)}")
        while len(self._lanes) >= _MOST_LANES:
            del self._lanes[next(iter(self._lanes))]
        pool = self._lanes[cores] = NativePool(address, self._library)
        return pool


def full_pool(library: ctypes.CDLL, num_threads: int) -> NativePool:
    """num_threads unpinned threads, the caller's included."""
    return NativePool(library.faser_pool_new(num_threads), library)


def _free(library: ctypes.CDLL, address: int, owner: int) -> None:
    """Free the pool, except in a forked child: it has the pool's memory but no threads that it could join."""
    if os.getpid() == owner:
        library.faser_pool_free(address)
