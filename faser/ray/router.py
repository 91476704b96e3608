"""PrefixRouter: the request router of Ray Serve that sends a prompt where its beginning has been.

Each gateway has one, which knows what it has sent itself. A replica that is full or gone is passed over; Ray Serve
then asks the next one in the order given here, and asks again once all have refused.
"""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from faser.engine.client.affinity import Seen, best_first
from faser.ray.calls import Call


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not read
    """Router that prefers the replica with the prompt's prefix. The argument of a request is a Call."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._seen: dict[ReplicaID, Seen] = {}
        self._sent: Counter[ReplicaID] = Counter()  # requests of this router that are not completed

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, best first."""
        call = None if pending_request is None else _call(pending_request)
        digests, avoid = (call.digests, call.avoid) if call else ((), frozenset())
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # once all ranks have refused
        ordered = best_first(
            candidate_replicas,
            lambda each: self._seen[each.replica_id].known(digests) if each.replica_id in self._seen else 0,
            lambda each: self._num_requests(each.replica_id),
        )
        return [[each] for each in sorted(ordered, key=lambda each: each.replica_id.unique_id in avoid)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._sent[replica_id] += 1
        if (call := _call(pending_request)) is not None:
            self._seen.setdefault(replica_id, Seen()).note(call.digests)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        if self._sent[replica_id]:  # else it is gone, and forgotten
            self._sent[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for gone in self._seen.keys() - self.curr_replicas.keys():
            del self._seen[gone]
        for gone in self._sent.keys() - self.curr_replicas.keys():
            del self._sent[gone]

    def _num_requests(self, replica_id: ReplicaID) -> int:
        """Return the requests of all gateways as the replica has said last, but at least this one's."""
        return max(self._sent[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)


def _call(pending_request: PendingRequest) -> Call | None:
    return next((each for each in pending_request.args if isinstance(each, Call)), None)
