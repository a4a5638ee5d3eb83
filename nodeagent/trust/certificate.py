"""Certificates as the agent uses them: one of its own where none is configured, made by the openssl program in a
short-lived child, and the TLS side of a server. Must never leave a key that it made on the disk, or ask for a password.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from pathlib import Path

from nodeagent.spec.apiconfig import ApiTlsConfig
from nodeagent.trust.endpoint import fingerprint

OPENSSL = "openssl"
TIMEOUT = 10.0
"""Seconds for openssl to make a certificate (it takes some 20 ms)."""
LARGEST = 256 * 1024
"""Bytes read of a certificate file."""


class CertificateError(Exception):
    """A certificate that cannot be used or made. ``str()`` says which, why, and what to do."""


async def server_context(tls: ApiTlsConfig, node: str, folder: Path) -> tuple[ssl.SSLContext, str]:
    """(the server's side of TLS, SHA-256 of its certificate). ``folder`` holds a made key for a moment. Raises
    ``CertificateError``."""
    if tls.cert is not None:
        return await asyncio.to_thread(configured, tls)
    made = await _make(node)
    return await asyncio.to_thread(_loaded, made, tls, folder)


def configured(tls: ApiTlsConfig) -> tuple[ssl.SSLContext, str]:
    """As ``server_context``, with the certificate of the config. Raises ``CertificateError``. Blocks."""
    assert tls.cert is not None
    try:
        with tls.cert.open("rb") as file:
            text = file.read(LARGEST).decode()
        return _context(tls, tls.cert, tls.key), fingerprint(text)
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"the certificate {tls.cert} cannot be used: {_words(error)}; see api.tls in the agent's config"
        ) from None


def _loaded(pem: str, tls: ApiTlsConfig, folder: Path) -> tuple[ssl.SSLContext, str]:
    file = folder / f".api.{secrets.token_hex(4)}.pem"
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "w") as out:
                out.write(pem)
            return _context(tls, file, None), fingerprint(pem)
        finally:
            file.unlink()
    except (OSError, ValueError) as error:
        raise CertificateError(f"the certificate that openssl made cannot be used: {_words(error)}") from None


def _context(tls: ApiTlsConfig, cert: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key, password=_no_password)
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except OSError as error:
            raise CertificateError(
                f"the CA {tls.client_ca} cannot be used: {_words(error)}; see api.tls.client_ca in the agent's config"
            ) from None
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _no_password() -> str:
    raise ValueError("its key is encrypted, write it without a password (mode 0600)")


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a certificate with its key ({error.reason or error})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


async def _make(node: str) -> str:
    """A new key and its certificate, as PEM. Only its fingerprint counts, so it is for nobody and never ends."""
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
