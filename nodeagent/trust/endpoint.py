"""Where a node serves https, and by which certificate it is known there, vouched for with the cluster's key.

So agents trust each other with nothing to set up, and who can write to the store, but has no key, cannot put himself
between two of them. Pure.
"""

from __future__ import annotations

import hashlib
import json
import ssl
from functools import lru_cache

from nodeagent.model.node import Https, NodeRecord
from nodeagent.trust.key import ClusterKey

PURPOSE = "api-endpoint"


def _payload(cluster: str, node: str, life: str, url: str, certificate: str) -> bytes:
    return json.dumps([cluster, node, life, url, certificate]).encode()


def vouch(key: ClusterKey, cluster: str, node: str, life: str, url: str, certificate: str) -> Https:
    """What a node tells the others of itself."""
    proof = key.sign(PURPOSE, _payload(cluster, node, life, url, certificate))
    return Https(url=url, certificate=certificate, proof=proof)


def genuine(key: ClusterKey, cluster: str, node: NodeRecord) -> bool:
    """Whether an agent with the cluster's key told this, in this life of the node."""
    told = node.facts.https
    if told is None:
        return False
    return _genuine(key, _payload(cluster, node.id, node.incarnation.life, told.url, told.certificate), told.proof)


@lru_cache(1024)
def _genuine(key: ClusterKey, payload: bytes, proof: str) -> bool:
    """Followers of logs ask for every node, five times a second."""
    return key.verify(PURPOSE, payload, proof)


def fingerprint(pem: str) -> str:
    """SHA-256, in hex, of the first certificate in a PEM text. Raises ValueError where there is none."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start, stop = pem.find(begin), pem.find(end)
    if start < 0 or stop < start:
        raise ValueError("no certificate in PEM form")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)])).hexdigest()
