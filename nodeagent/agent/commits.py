"""Carrying the workers' commits of checkpoints to the store, with the token of the generation that asks.

Whether a commit counts is the store's to decide: the token is compared there. Must never answer a worker without the
store's own word.
"""

from __future__ import annotations

import structlog

from nodeagent.agent.lease import Lease
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.job import Checkpoint
from nodeagent.pods.base import PodHost
from nodeagent.store.base import Store, StoreRefusedError
from nodeagent.trust.seal import Seal


class Commits:
    """Those of one node."""

    def __init__(self, lease: Lease, *, store: Store, host: PodHost, snapshot: Snapshot, seal: Seal) -> None:
        self._seal = seal
        self._lease, self._store, self._host, self._snapshot = lease, store, host, snapshot
        self._log = structlog.get_logger("commits").bind(node=lease.node)

    async def carry(self) -> None:
        """All that is wished for now. Raises StoreUnavailableError: the wishes stay for another time."""
        for uid, status in self._host.status().items():
            wish = status.commit
            if wish is None:
                continue
            lease, log = self._lease, self._log.bind(uid=uid, checkpoint=wish.name, generation=wish.token.number)
            try:
                pointer = Checkpoint(name=wish.name, step=wish.step, number=wish.token.number, order=wish.order)
            except ValueError as error:  # the shim is the job's user's
                log.warning("not committed", why=str(error))
                self._host.committed(uid, wish, "it is no name of a checkpoint, or has no number")
                continue
            try:
                signature = self._seal.pointer(uid, pointer).signature
                job = await self._store.commit(
                    uid, wish.token, lease.node, lease.incarnation, wish.name, wish.step, wish.order, signature
                )
            except StoreRefusedError as refusal:
                if refusal.code == "recovering":
                    continue  # it is decided when every agent has said what it knows
                log.warning("not committed", code=refusal.code, why=str(refusal))
                self._host.committed(uid, wish, str(refusal))
            else:
                self._snapshot.absorb_job(job)
                log.info("committed", step=wish.step)
                self._host.committed(uid, wish, "")
