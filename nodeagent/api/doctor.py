"""``doctor`` over HTTP: the problems that this agent finds on its node, between nodes, and in the cluster. Every check
has a bound; modules for checks are imported at the first request. Must never change anything.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from nodeagent.agent.gauges import busy_nodes, node_state
from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.auth import UserDatabase
from nodeagent.api.limits import JobSizes, filled, limits_json, owned, room_of_users, unlimited
from nodeagent.api.loopback import why_not
from nodeagent.api.published import cuts_of
from nodeagent.api.throttle import Throttle
from nodeagent.model.job import Filled, Quota
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.spec.sections import serves

if TYPE_CHECKING:
    from nodeagent.doctor.cluster import StoreLooker
    from nodeagent.doctor.machine import Looker
    from nodeagent.model.facts import HostFacts
    from nodeagent.plan.findings.cluster import AgentStanding, PeerAnswer, Placed

PATH = "/v1/doctor"


class DoctorRoutes:
    """The handler, for one agent's view."""

    def __init__(self, view: AgentView, throttle: Throttle, sizes: JobSizes) -> None:
        self.view = view
        self._throttle, self._sizes = throttle, sizes
        self._looker: Looker | None = None
        self._store: StoreLooker | None = None
        self._looking: asyncio.Future[tuple[PeerAnswer, ...]] | None = None

    def table(self) -> list[web.RouteDef]:
        """The one route."""
        return [web.get(PATH, self.doctor)]

    @requests.takes("peers")
    async def doctor(self, request: web.Request) -> web.Response:
        """GET /v1/doctor?peers: findings as items, errors first. Answers even before the agent has joined."""
        await asyncio.to_thread(_load)
        from nodeagent.doctor.cluster import StoreLooker, report, store_findings
        from nodeagent.plan.findings.cluster import (
            judge_agent,
            judge_cuts,
            judge_peers,
            judge_recovery,
            judge_room,
            largest,
        )
        from nodeagent.plan.findings.host import judge_host

        if self._store is None:
            self._store = StoreLooker(store_findings)
        view, here = self.view, f"node/{self.view.node}"
        wanted = requests.flag(request, "peers")
        host, store, peers, cuts = await asyncio.gather(
            self._host(),
            self._store.look(view.config),
            self._peers() if wanted else _none(),
            cuts_of(view, view.cluster().jobs.values()),
        )
        room = room_of_users()
        have = await self._filled(auth.database(request))
        more_of_it = {"most": tuple(largest(have, room)), "loopback": await self._loopback()}
        standing = self._standing().model_copy(update=more_of_it)
        found: list[Placed] = [(here, f) for f in (*judge_agent(standing), *judge_host(host))]
        found += [("store", f) for f in store]
        found += judge_recovery(view.health().store_waits)
        found += await self._cluster()
        found += judge_room(have, room)
        found += await self._users(auth.database(request))
        found += judge_cuts(cuts, time.time())
        found += judge_peers(view.node, peers)
        more = {"limits": limits_json(view.config.limits), "peers": [p.model_dump() for p in peers] if wanted else None}
        return web.json_response(report(found) | {"node": view.node} | more)

    def _standing(self) -> AgentStanding:
        from nodeagent.plan.findings.cluster import AgentStanding

        health, me = self.view.health(), self.view.me()
        away, jobs = health.store_away_since, self.view.cluster().jobs
        undecided = {(jobs[uid].name if uid in jobs else uid): place for uid, place in health.undecided.items()}
        return AgentStanding(
            node=self.view.node,
            joined=health.joined,
            reason=health.reason,
            lease_left=health.lease_left,
            lent=len(health.lent),
            store_away=None if away is None else max(0.0, time.time() - away),
            unread=dict(health.unread),
            beyond=health.beyond,
            undecided=undecided,
            store_unusable=health.store_unusable,
            loop_lag=health.loop_lag,
            unsaved=health.unsaved,
            https_missing=me is not None
            and me.facts.https is None
            and serves(self.view.config.api.listen, me.facts.address),
        )

    async def _loopback(self) -> str:
        me = self.view.me()
        if me is None or me.facts.http:
            return ""
        return await asyncio.to_thread(why_not, self.view.config.ports.api)

    async def _host(self) -> HostFacts:
        from nodeagent.agent.machine import find_address, is_named
        from nodeagent.doctor.machine import LOOK_BOUND, Looker, look_at

        if self._looker is None:
            self._looker = Looker(look_at, LOOK_BOUND)
        me, config = self.view.me(), self.view.config
        found = find_address(config, os.environ)
        address = found if me is None else me.facts.address
        facts = await self._looker.look(config, self.view.node, address, None if me is None else len(me.facts.gpus))
        served = "" if me is None or me.facts.https is None else me.facts.https.certificate
        now = "" if is_named(config, os.environ) else found
        return facts.model_copy(update={"address_now": now, "certificate_served": served})

    async def _cluster(self) -> tuple[Placed, ...]:
        cluster = self.view.cluster()
        if self.view.me() is None:
            return ()
        why = {uid: self.view.why(uid) for uid, job in cluster.jobs.items() if job.phase in ("queued", "holding")}
        # In a thread: with notes of its own, since those that belong to the view are the loop's alone.
        return await requests.written(partial(_judged, replace(cluster, notes=Notes()), why))

    async def _users(self, names: UserDatabase) -> tuple[Placed, ...]:
        from nodeagent.plan.findings.cluster import judge_users

        view, limits = self.view, self.view.config.limits
        # One job of each owner: if there is one, a job that he submitted himself, which says who he is.
        jobs = sorted(view.cluster().jobs.values(), key=lambda job: job.spec.submitter.uid == job.owner)
        of = {job.owner: job for job in jobs}
        free = await asyncio.gather(*(unlimited(view, names, job) for job in of.values()))
        have = await owned(view, self._sizes, [owner for owner, has_none in zip(of, free, strict=True) if not has_none])
        refused = self._throttle.refused()
        await names.learn([*have, *(key for key in refused if isinstance(key, int))])
        asked = {names.shown(key) if isinstance(key, int) else key: why for key, why in refused.items()}
        by_name = {names.shown(owner): found for owner, found in have.items()}
        return judge_users(view.node, by_name, Quota(jobs=limits.jobs, bytes=limits.job_bytes), asked)

    async def _filled(self, names: UserDatabase) -> dict[str, Filled]:
        """What each owner's jobs take of what agents read, by name."""
        have = await filled(self.view, self._sizes)
        await names.learn(have)
        return {names.shown(owner): found for owner, found in have.items()}

    async def _peers(self) -> tuple[PeerAnswer, ...]:
        """One look at a time, whose answer all get who ask meanwhile: it connects to every node."""
        from nodeagent.doctor.cluster import PEER_BOUND, ask_peers

        if self._looking is None or self._looking.done():
            nodes = self.view.cluster().nodes.items()
            asked = {name: node.facts.address for name, node in nodes if name != self.view.node and not node.left}
            self._looking = asyncio.ensure_future(ask_peers(asked, self.view.config.ports.rendezvous[0], PEER_BOUND))
        return await asyncio.shield(self._looking)


def _load() -> None:
    """Imports the modules of a check: in the loop, the import would delay a heartbeat for too long."""
    import nodeagent.doctor.cluster
    import nodeagent.doctor.machine
    import nodeagent.plan.findings.cluster
    import nodeagent.plan.findings.host  # noqa: F401


def _judged(cluster: Cluster, why: Mapping[str, tuple[str, ...]]) -> tuple[Placed, ...]:
    """Runs in a thread: for a thousand nodes it takes longer than the agent's loop may be blocked."""
    from nodeagent.plan.findings.cluster import judge_cluster

    busy = busy_nodes(cluster)
    states = {name: node_state(node, cluster, busy) for name, node in cluster.nodes.items()}
    return judge_cluster(cluster, states, why)


async def _none() -> tuple[PeerAnswer, ...]:
    return ()
