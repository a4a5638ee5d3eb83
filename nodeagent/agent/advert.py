"""What an agent tells the others of itself while it runs: where it is reached, how well its machine is, and that it
restarts. Changes its own facts and nothing else; they travel with the next beat."""

from __future__ import annotations

from collections.abc import Mapping

from nodeagent.agent.lease import Lease
from nodeagent.store.messages import Note
from nodeagent.trust.endpoint import vouch
from nodeagent.trust.key import ClusterKey

MOST_NOTED = 64


class Advert:
    """The agent's own addresses."""

    def __init__(self, node: str, cluster: str, key: ClusterKey, lease: Lease) -> None:
        self._node, self._cluster, self._key, self._lease = node, cluster, key, lease
        self._https: tuple[str, str] | None = None

    def http(self, url: str) -> None:
        """Where health and metrics are to be found."""
        self._tell(http=url)

    def https(self, url: str, certificate: str) -> None:
        """Where others are served over https, by this certificate."""
        self._https = (url, certificate)
        self.vouch()

    def peer(self, address: str) -> None:
        """Where the lease process is asked."""
        if address != self._lease.facts.peer:
            self._tell(peer=address)

    def vouch(self) -> None:
        """Sign the https address for the life that the node has now."""
        if self._https is not None:
            life = self._lease.incarnation.life
            self._tell(https=vouch(self._key, self._cluster, self._node, life, *self._https))

    def restarts(self, since: float) -> None:
        """No agent is there from this Unix time on, until its next start."""
        self._tell(restarting=since, http="")

    def health(self, facts: Mapping[str, object]) -> None:
        """What is known of the node's health."""
        self._tell(**facts)

    def note(self, kind: str, text: str) -> None:
        """An event of this node, for the log; beyond ``MOST_NOTED`` that nobody took the oldest go."""
        self._lease.notes.append(Note(kind=kind, text=text))
        del self._lease.notes[:-MOST_NOTED]

    def _tell(self, **facts: object) -> None:
        self._lease.facts = self._lease.facts.model_copy(update=facts)
