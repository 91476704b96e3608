"""Counters of early pruning since the start of the engine."""

from dataclasses import replace

from faser.types import PrunedLayer, PruneStats


class PruneCounters:
    """Counts into a PruneStats, layer by layer. stats: layers are brought up to date by close_step."""

    def __init__(self) -> None:
        self._layers: dict[int, PrunedLayer] = {}
        self.stats = PruneStats()

    def looked(self, seconds: float) -> None:
        """A look at drafted tokens, with the leaving of rows after it, took this long."""
        self.stats = replace(self.stats, seconds=self.stats.seconds + seconds)

    def ran(self, *, pruning: bool, num_drafts: int) -> None:
        """A step with a look is through all layers. pruning: rows could leave; else it was a shadow step."""
        before = self.stats
        self.stats = replace(
            before,
            shadow_steps=before.shadow_steps + (not pruning),
            pruned_steps=before.pruned_steps + pruning,
            drafted_rows=before.drafted_rows + num_drafts,
        )

    def add(
        self,
        num_layers: int,
        *,
        rows: int = 0,
        wasted: int = 0,
        judged: int = 0,
        flagged: int = 0,
        false_prunes: int = 0,
    ) -> None:
        """Counts of one step at the look after num_layers layers; see PrunedLayer."""
        before = self._layers.get(num_layers, PrunedLayer(layer=num_layers))
        self._layers[num_layers] = PrunedLayer(
            layer=num_layers,
            rows=before.rows + rows,
            wasted=before.wasted + wasted,
            judged=before.judged + judged,
            flagged=before.flagged + flagged,
            false_prunes=before.false_prunes + false_prunes,
        )

    def close_step(self) -> None:
        self.stats = replace(self.stats, layers=tuple(self._layers[each] for each in sorted(self._layers)))
