"""The series of targets: predictions only where they are known, decisions by class and target."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from faser.config.speculation import SpeculationConfig
from faser.metrics.server import Metrics
from faser.types.outlook import ClassOutlook, Decision, Outlook, Target
from faser.types.request import SpeculationParams

CONFIG = SpeculationConfig(classes={"chat": SpeculationParams(class_name="chat")})


def metrics() -> Metrics:
    return Metrics(model_name="tiny", max_model_len=64, speculation=CONFIG)


def values(made: Metrics, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(made.render().decode()):
        for sample in family.samples:
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] = sample.value
    return found


def outlook(*, is_known: bool) -> Outlook:
    return Outlook(
        rate=2.0,
        capacity=4.0,
        is_known=is_known,
        ttft_s=0.1,
        ttft_p99_s=0.3,
        tpot_s=0.02,
        latency_s=1.5,
        latency_p99_s=4.0,
        classes=(ClassOutlook(class_name="chat", attainment=0.97, headroom=((0.9, 1.25), (0.99, -0.5))),),
    )


def test_an_outlook_that_is_known_is_shown_by_class_share_and_statistic() -> None:
    made = metrics()
    made.outlook(outlook(is_known=True))
    assert values(made, "faser_predicted_ttft_seconds", "statistic") == {("mean",): 0.1, ("p99",): 0.3}
    assert values(made, "faser_predicted_tpot_seconds", "statistic") == {("mean",): 0.02}
    assert values(made, "faser_predicted_utilisation_ratio") == {(): 0.5}
    headroom = values(made, "faser_goodput_headroom", "class", "share")
    assert (headroom["chat", "0.9"], headroom["chat", "0.99"]) == (1.25, -0.5)
    assert math.isnan(headroom["default", "0.9"])
    assert values(made, "faser_predicted_attainment_ratio", "class")["chat",] == 0.97


def test_times_that_are_not_known_are_no_numbers_and_the_headroom_stays() -> None:
    made = metrics()
    made.outlook(outlook(is_known=True))
    made.outlook(outlook(is_known=False))
    for name in ("ttft", "tpot", "latency"):
        assert all(map(math.isnan, values(made, f"faser_predicted_{name}_seconds", "statistic").values()))
    assert math.isnan(values(made, "faser_predicted_attainment_ratio", "class")["chat",])
    assert values(made, "faser_goodput_headroom", "class", "share")["chat", "0.9"] == 1.25


@pytest.mark.parametrize(
    "decision, target",
    [(Decision.MET, Target.NONE), (Decision.REFUSED, Target.TPOT), (Decision.WAITS, Target.TTFT)],
)
def test_a_decision_is_counted_by_class_and_target(decision: Decision, target: Target) -> None:
    made = metrics()
    made.admission("chat", decision, target)
    found = values(made, "faser_admission_decisions_total", "class", "decision", "target")
    assert found["chat", decision.value, target.value] == 1
    assert sum(found.values()) == 1
    assert len(found) == 2 * 8
