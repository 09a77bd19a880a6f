"""The request router that Ray Serve asks where a request to an engine goes."""

from __future__ import annotations

from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from razor_dist.ray_serve.routing import EngineTable, Route


class PrefixRouter(RequestRouter):
    """Sends a request to the engine that would answer it first, by `EngineTable`."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._table: EngineTable[ReplicaID] = EngineTable()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas, best first, each in a list of its own: a full one is passed over."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all of them are full
        route, request = _route(pending_request), pending_request.metadata.internal_request_id
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        ids = {replica_id: replica_id.unique_id for replica_id in replicas}
        for replica_id, name in ids.items():
            if route.avoid.get(name):
                self._table.forget(replica_id)
        order = self._table.order(ids, route)
        # Now, since others may choose before this one is routed.
        self._table.place(order[0], request, route)
        pending_request.future.add_done_callback(partial(self._unless_routed, request))
        return [[replicas[replica_id]] for replica_id in order]

    def _unless_routed(self, request: str, future: Any) -> None:
        if future.cancelled():
            self._table.end(request)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        request = pending_request.metadata.internal_request_id
        self._table.place(replica_id, request, _route(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._table.end(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._table.forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.update([replica.replica_id for replica in replicas])


def _route(pending: PendingRequest) -> Route:
    """Return the route of a pending call of `Engine.answer`."""
    route: Route = pending.args[0].route
    return route
