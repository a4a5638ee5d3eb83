"""A connection to an agent over https. The certificate is checked, by a CA or by its fingerprint, before anything is
sent. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import socket
import ssl

from nodeagent.ctl.errors import CtlError, Exit, NoAgentError
from nodeagent.ctl.where import ENV_CACERT, ENV_FINGERPRINT, Where

CONNECT_TIMEOUT = 5.0
"""Seconds to connect, and for the handshake."""


class TlsConnection(http.client.HTTPConnection):
    """A connection to the named agent. ``connect`` raises ``NoAgentError`` for an agent that is not trusted."""

    def __init__(self, where: Where, timeout: float) -> None:
        self._host, self._port = where.place()
        super().__init__(self._host, self._port, timeout=timeout)
        self._digests = where.digests()
        self._context = _context(where)

    def connect(self) -> None:
        plain = socket.create_connection((self._host, self._port), CONNECT_TIMEOUT)
        try:
            secure = self._context.wrap_socket(plain, server_hostname=self._host)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise _untrusted(
                f"the certificate of {self._host}:{self._port} is not trusted: {error.verify_message}"
            ) from None
        except ssl.SSLError as error:
            plain.close()
            what = f"{self._host}:{self._port} does not speak TLS as an agent does: {error.reason or error}"
            raise NoAgentError(what, "is it the agent's https port (ports.api), and api.listen on?") from None
        except BaseException:
            plain.close()
            raise
        shown = hashlib.sha256(secure.getpeercert(binary_form=True) or b"").digest()
        if self._digests and not any(hmac.compare_digest(shown, digest) for digest in self._digests):
            secure.close()
            raise _untrusted(f"the certificate of {self._host}:{self._port} has another fingerprint: {shown.hex()}")
        secure.settimeout(self.timeout)
        self.sock = secure


def _untrusted(what: str) -> NoAgentError:
    return NoAgentError(
        f"{what}; nothing was sent",
        "give the CA that signed it (--cacert FILE), or the fingerprint that `nodeagentctl describe node/NAME` shows "
        f"where the agent is known (--fingerprint HEX); or {ENV_CACERT}, {ENV_FINGERPRINT}",
    )


def _context(where: Where) -> ssl.SSLContext:
    if where.fingerprint is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint is the stronger check
        return context
    try:
        return ssl.create_default_context(cafile=where.cacert)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CtlError(f"cannot use the CA {where.cacert}: {why}", Exit.USAGE, "give a PEM file") from None
