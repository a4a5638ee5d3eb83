"""What `check-config` finds wrong in the files that the ``api`` section names. Reads them as the agent would."""

from __future__ import annotations

import ssl

from nodeagent.api.tokens import read_tokens
from nodeagent.spec.apiconfig import ApiConfig
from nodeagent.spec.errors import SpecError
from nodeagent.trust.certificate import CertificateError, configured, trust


def check_files(api: ApiConfig) -> list[str]:
    """A line for each mistake."""
    found = []
    if api.tokens is not None:
        try:
            read_tokens(api.tokens)
        except SpecError as wrong:
            found += str(wrong).splitlines()
    try:
        if api.tls.cert is not None:
            configured(api.tls)
        elif api.tls.client_ca is not None:
            trust(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), api.tls.client_ca)
    except CertificateError as wrong:
        found.append(str(wrong))
    return found
