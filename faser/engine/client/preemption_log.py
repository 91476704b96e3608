"""PreemptionLog: one line in the log when sequences are preempted often, with the settings that help."""

import logging

from faser.config.declaration import show_bytes

_log = logging.getLogger("faser.engine")

_OFTEN = 20  # preemptions within _WINDOW_S: beyond what a short burst of long answers causes
_WINDOW_S = 60.0
_QUIET_S = 600.0


class PreemptionLog:
    """Warns at _OFTEN preemptions within a minute, then not for ten minutes. Times are of time.monotonic()."""

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._began_s = 0.0
        self._before = 0  # preemptions when the window began
        self._last = 0
        self._quiet_until_s = 0.0

    def note(self, num_preemptions: int, now_s: float, kv_cache_bytes: int) -> None:
        """num_preemptions: since the engine started. A new engine begins at 0."""
        if num_preemptions == self._last:
            return
        if num_preemptions < self._last or now_s - self._began_s > _WINDOW_S:
            self._began_s = now_s
            self._before = min(num_preemptions, self._last)
        self._last = num_preemptions
        recent = num_preemptions - self._before
        if recent < _OFTEN or now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + _QUIET_S
        _log.warning(
            "the KV cache is too small for this load: %d sequences were preempted within a minute, and what they "
            "had computed is computed again; raise --kv-cache-memory, which is %s, or lower --max-num-seqs, which "
            "is %d",
            recent,
            show_bytes(kv_cache_bytes),
            self._max_num_seqs,
        )
