"""Series of a server with several models: how many are loaded, and how they come and go.

Beside them each model has the series of a server, with its own label `model_name`, from the start and whether or
not it is loaded.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from faser.metrics.replicas import ReplicaMetrics
from faser.metrics.server import Metrics
from faser.types.engine import EngineState

_LOAD_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
UNLOAD_REASONS = ("evicted", "idle", "request", "died")


class ModelsMetrics(ReplicaMetrics):
    """Metrics of several models. of: by the model's name. Use it from one thread.

    An engine that has not been started, or has left, is in no state.
    """

    def __init__(self, of: Mapping[str, Metrics]) -> None:
        super().__init__(tuple(of.values()))
        self.of = of
        self._registry = CollectorRegistry()
        self._num_loaded = Gauge("faser_models_loaded", "Models that are loaded now.", registry=self._registry)
        self._loads = Counter(
            "faser_model_loads",
            "Loads of a model, by outcome.",
            ("model_name", "outcome"),
            registry=self._registry,
        )
        self._unloads = Counter(
            "faser_model_unloads",
            "Times a model left, by reason.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        self._load_s = Histogram(
            "faser_model_load_seconds",
            "Start of a model's engine, without downloads and without waiting for memory.",
            ("model_name",),
            registry=self._registry,
            buckets=_LOAD_S,
        )
        for name, metrics in of.items():
            metrics.engine_absent()
            self._load_s.labels(name)
            for outcome in ("loaded", "failed"):
                self._loads.labels(name, outcome)
            for reason in UNLOAD_REASONS:
                self._unloads.labels(name, reason)

    def loading(self, model: str) -> None:
        """A model's engine is being started."""
        self.of[model].engine_state(EngineState.LOADING)

    def loaded(self, model: str, load_s: float) -> None:
        """A model was loaded, in this time."""
        self._num_loaded.inc()
        self._loads.labels(model, "loaded").inc()
        self._load_s.labels(model).observe(load_s)

    def unloaded(self, model: str, reason: str) -> None:
        """A loaded model has left. reason: one of UNLOAD_REASONS."""
        self._num_loaded.dec()
        self._unloads.labels(model, reason).inc()
        self.of[model].engine_absent()

    def failed(self, model: str) -> None:
        """A model could not be loaded."""
        self._loads.labels(model, "failed").inc()
        self.of[model].engine_absent()

    def render(self) -> bytes:
        """All series in Prometheus' text format; see CONTENT_TYPE."""
        return super().render() + generate_latest(self._registry)
