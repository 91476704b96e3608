"""Which replica the router of Ray Serve asks first. The replicas are fakes; the router's base class is Ray's."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="make ray installs it")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from faser.ray.calls import Call
from faser.ray.router import PrefixRouter

DEPLOYMENT = DeploymentID(name="Replica", app_name="faser")


class FakeReplica:
    """What the router uses of a RunningReplica."""

    max_ongoing_requests = 100

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        del deadline_s
        return 0


def pending(*digests: bytes, avoid: tuple[str, ...] = ()) -> PendingRequest:
    call = Call(method="POST", path="/", query=b"", headers=(), body=b"", digests=digests, avoid=frozenset(avoid))
    return PendingRequest(args=[call], kwargs={}, metadata=SimpleNamespace())


class World:
    """A router with three replicas; each method is a thing that Ray Serve does."""

    def __init__(self) -> None:
        self.replicas = {name: FakeReplica(name) for name in "abc"}
        self.router = PrefixRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
        )
        self.router.update_replicas(list(self.replicas.values()))

    async def order(self, request: PendingRequest) -> str:
        ranks = await self.router.choose_replicas(list(self.router.curr_replicas.values()), request)
        assert all(len(rank) == 1 for rank in ranks)
        return "".join(rank[0].replica_id.unique_id for rank in ranks)

    def routed(self, request: PendingRequest, name: str) -> None:
        self.router.on_request_routed(request, self.replicas[name].replica_id, None)

    def completed(self, name: str) -> None:
        self.router.on_request_completed(self.replicas[name].replica_id, "")

    def told(self, name: str, num_requests: int) -> None:
        self.router.on_new_queue_len_info(self.replicas[name].replica_id, num_requests)


def run(story: Any) -> None:
    async def within() -> None:
        await story(World())

    asyncio.run(within())


def test_a_prompt_goes_where_its_beginning_went() -> None:
    async def story(world: World) -> None:
        world.routed(pending(b"1", b"2"), "b")
        world.completed("b")
        world.routed(pending(b"1", b"2", b"3"), "c")
        world.completed("c")
        assert (await world.order(pending(b"1", b"2", b"3", b"4")))[0] == "c"
        assert (await world.order(pending(b"1")))[0] in "bc"
        assert (await world.order(pending(b"9")))[0] == "a"

    run(story)


def test_a_busy_replica_is_passed_over_and_counts_as_idle_again() -> None:
    async def story(world: World) -> None:
        for _ in range(6):
            world.routed(pending(b"1"), "a")
        assert (await world.order(pending(b"1")))[0] != "a"
        for _ in range(6):
            world.completed("a")
        assert (await world.order(pending(b"1")))[0] == "a"

    run(story)


def test_requests_of_other_gateways_count() -> None:
    async def story(world: World) -> None:
        for name, number in (("a", 7), ("b", 3), ("c", 5)):
            world.told(name, number)
        assert await world.order(pending()) == "bca"

    run(story)


def test_a_replica_that_has_refused_comes_last() -> None:
    async def story(world: World) -> None:
        world.routed(pending(b"1"), "a")
        world.completed("a")
        assert (await world.order(pending(b"1", avoid=("a",))))[-1] == "a"

    run(story)


def test_a_replica_that_is_gone_is_forgotten() -> None:
    async def story(world: World) -> None:
        world.routed(pending(b"1"), "a")
        world.router.update_replicas([world.replicas["b"], world.replicas["c"]])
        world.completed("a")  # its end is heard of late
        world.router.update_replicas(list(world.replicas.values()))
        world.told("a", 1)
        assert await world.order(pending(b"1")) == "bca"

    run(story)


def test_a_request_of_another_kind_goes_to_the_least_busy_one() -> None:
    async def story(world: World) -> None:
        world.routed(pending(b"1"), "a")
        assert (await world.order(PendingRequest(args=[], kwargs={}, metadata=SimpleNamespace())))[0] != "a"

    run(story)
