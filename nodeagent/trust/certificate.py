"""Certificates of the agent: the configured one, or one that the agent makes. Also the cluster key's signature on a
node's https address and certificate.

So agents trust each other without any setup. A user who can write to the store but has no key cannot place a server
between two agents. Pure.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import ssl
import stat
from functools import lru_cache
from pathlib import Path

from nodeagent.model.node import HttpsAddress, NodeRecord
from nodeagent.osutil.linux import open_plain
from nodeagent.spec.sections import ApiTlsConfig
from nodeagent.trust.key import ClusterKey

MADE = "api.pem"
"""File in the state folder: the certificate that the agent made, with its key."""
OPENSSL = "openssl"
TIMEOUT = 10.0
"""Seconds for openssl to make a certificate (it takes some 20 ms)."""
LARGEST = 256 * 1024
"""The most bytes read of a certificate file."""


class CertificateError(Exception):
    """A certificate that cannot be used or made. ``str()`` says which, why, and what to do."""


async def server_context(tls: ApiTlsConfig, node: str, folder: Path) -> tuple[ssl.SSLContext, str]:
    """(the server's side of TLS, SHA-256 of its certificate). If no certificate is configured, one is made and kept in
    ``folder``, so that the node keeps its fingerprint. Raises ``CertificateError``."""
    if tls.cert is not None:
        return await asyncio.to_thread(configured, tls)
    file = folder / MADE
    try:
        if not await asyncio.to_thread(_usable, file):
            await asyncio.to_thread(_keep, await _make(node), file)
        return await asyncio.to_thread(_loaded, tls, file, None)
    except (OSError, ValueError) as error:
        raise CertificateError(f"the certificate {file} cannot be used: {_words(error)}") from None


def _usable(file: Path) -> bool:
    """Returns whether an earlier run left a certificate there whose key no other user can have read. Raises OSError
    where nobody can say: another one in its place would have another fingerprint."""
    try:
        found = file.stat()
        private = found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return private and bool(_loaded(ApiTlsConfig(), file, None))
    except (FileNotFoundError, ssl.SSLError, ValueError):
        return False


def _keep(pem: str, file: Path) -> None:
    """Writes the file whole or not at all; other users can never read it."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as out:
            out.write(pem)
        draft.replace(file)
    except OSError as error:
        raise CertificateError(f"the certificate {file} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


def configured(tls: ApiTlsConfig) -> tuple[ssl.SSLContext, str]:
    """The same as ``server_context``, with the certificate of the config. Raises ``CertificateError``. Blocks."""
    assert tls.cert is not None
    try:
        return _loaded(tls, tls.cert, tls.key)
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"the certificate {tls.cert} cannot be used: {_words(error)}; see api.tls in the agent's config"
        ) from None


def _loaded(tls: ApiTlsConfig, cert: Path, key: Path | None) -> tuple[ssl.SSLContext, str]:
    """Raises ``OSError`` or ValueError for the certificate, ``CertificateError`` for the CA of clients."""
    if key is not None:
        try:
            open_plain(key).close()
        except OSError as error:
            raise OSError(error.errno, f"its key {key}: {error.strerror}") from None
    with open_plain(cert) as file:
        text = file.read(LARGEST).decode()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key, password=_no_password)
    if tls.client_ca is not None:
        trust(context, tls.client_ca)
    return context, fingerprint(text)


def trust(context: ssl.SSLContext, ca: Path) -> None:
    """Accept client certificates of this CA; a client need not send one. Raises ``CertificateError``."""
    try:
        open_plain(ca).close()
        context.load_verify_locations(ca)
    except OSError as error:
        raise CertificateError(
            f"the CA {ca} cannot be used: {_words(error)}; see api.tls.client_ca in the agent's config"
        ) from None
    context.verify_mode = ssl.CERT_OPTIONAL


def _no_password() -> str:
    raise ValueError("its key is encrypted, write it without a password (mode 0600)")


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a certificate with its key ({error.reason or error})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


async def _make(node: str) -> str:
    """A new key and its certificate, as PEM. Only its fingerprint counts, so name and lifetime do not matter."""
    command = [
        OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256",
        "-days", "3650", "-subj", f"/CN={node}", "-keyout", "-", "-out", "-",
    ]  # fmt: skip
    how = "install openssl, or set api.tls.cert in the agent's config"
    try:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise CertificateError(f"no certificate can be made: openssl: {error.strerror}; {how}") from None
    try:
        async with asyncio.timeout(TIMEOUT):
            out, err = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise CertificateError(f"openssl made no certificate within {TIMEOUT:g} s") from None
    if child.returncode != 0:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        raise CertificateError(f"openssl made no certificate: {''.join(last) or child.returncode}; {how}")
    return out.decode()


PURPOSE = "api-endpoint"


def _payload(cluster: str, node: str, life: str, url: str, certificate: str) -> bytes:
    return json.dumps([cluster, node, life, url, certificate]).encode()


def vouch(key: ClusterKey, cluster: str, node: str, life: str, url: str, certificate: str) -> HttpsAddress:
    """The https address that a node publishes to other nodes."""
    proof = key.sign(PURPOSE, _payload(cluster, node, life, url, certificate))
    return HttpsAddress(url=url, certificate=certificate, proof=proof)


def genuine(key: ClusterKey, cluster: str, node: NodeRecord) -> bool:
    """Returns whether an agent with the cluster's key published this address, in this life of the node."""
    reported = node.facts.https
    if reported is None:
        return False
    return _genuine(
        key, _payload(cluster, node.id, node.incarnation.life, reported.url, reported.certificate), reported.proof
    )


@lru_cache(1024)
def _genuine(key: ClusterKey, payload: bytes, proof: str) -> bool:
    """Cached: clients that follow logs check every node five times a second."""
    return key.verify(PURPOSE, payload, proof)


def certificate_digest(file: Path) -> str:
    """``fingerprint`` of a file that openssl could read; empty if it cannot be read."""
    try:
        with open_plain(file) as opened:
            return fingerprint(opened.read(LARGEST).decode())
    except (OSError, ValueError):
        return ""


def fingerprint(pem: str) -> str:
    """SHA-256, in hex, of the first certificate in a PEM text. Raises ValueError if there is none."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start, stop = pem.find(begin), pem.find(end)
    if start < 0 or stop < start:
        raise ValueError("no certificate in PEM form")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)])).hexdigest()
