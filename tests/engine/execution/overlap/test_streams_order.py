"""Steps of one model run in order, on the whole device and on lanes of any share.

All lanes of a backend share attention's workspace, which relies on this order. The fake device knows which work is
guaranteed to run before another (fake_lane_device), so an order by chance does not count.

Bugs that these tests have caught: lanes that do not wait for the caller's stream; a caller's stream that waits for
one lane only, or for none.
"""

import random

import pytest

from faser.engine.execution.overlap.partition import Lane, synchronous
from faser.engine.execution.overlap.streams import LanePair, StreamLanes
from faser.kernels.interface.shapes import DeviceLane
from tests.kernels.cuda.fake_lane_device import FakeLaneDevice

SHARES = (1 / 11, 5 / 33, 3 / 11)


def pair_of(share: float, device: FakeLaneDevice) -> LanePair:
    def lane(name: str, share: float) -> Lane:
        count = round(share * device.num_processors)
        return Lane(
            cores=None,
            device_lane=DeviceLane(name=name, share=share, num_processors=count, stream=device.stream(0)),
        )

    return LanePair(draft=lane("draft", share), verify=lane("verify", 1 - share))


class Steps:
    """Steps of two models, each of which checks that it runs after the model's earlier steps."""

    def __init__(self, lanes: StreamLanes, device: FakeLaneDevice) -> None:
        self._lanes = lanes
        self._device = device
        self.enqueued: dict[str, list[str]] = {"target": [], "draft": []}

    def _step(self, model: str) -> None:
        """Two kernels: the second reads what the first wrote, so no other step may run between them."""
        for part in ("split", "joined"):
            name = f"{model} {len(self.enqueued[model])} {part}"
            assert self._device.work(name) >= set(self.enqueued[model]), (
                f"{name} may run before an earlier one has ended"
            )
            self.enqueued[model].append(name)

    def on_the_whole_device(self) -> None:
        """Without waiting: a step is enqueued while the previous one may still run."""
        for model in ("draft", "target", "target"):
            self._step(model)

    def on_lanes(self, pair: LanePair) -> None:
        self._lanes.run_both(
            pair, lambda _lane, _verify_done: self._step("draft"), synchronous(lambda _lane: self._step("target"))
        )

    def failing_on_lanes(self, pair: LanePair) -> None:
        def drafting(_lane: Lane, _verify_done: object) -> None:
            self._step("draft")
            raise ValueError("no draft")

        with pytest.raises(ValueError, match="no draft"):
            self._lanes.run_both(pair, drafting, synchronous(lambda _lane: self._step("target")))


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_one_model_are_in_order_wherever_they_run(seed: int) -> None:
    device, draw = FakeLaneDevice(), random.Random(seed)
    lanes, pairs = StreamLanes(device), [pair_of(share, device) for share in SHARES]
    steps = Steps(lanes, device)
    try:
        for _ in range(30):
            match draw.randrange(4):
                case 0:
                    steps.on_the_whole_device()
                case 1:
                    steps.failing_on_lanes(draw.choice(pairs))
                case _:
                    steps.on_lanes(draw.choice(pairs))
    finally:
        lanes.close()
    assert all(len(each) >= 60 for each in steps.enqueued.values())
