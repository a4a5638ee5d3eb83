"""Authorities that nobody asks for are not loaded; who needs them gets them."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nodeagent.agent.slim import without_authorities

ROOT = Path(__file__).parents[3]
IMPORT = """
import ssl
from nodeagent.agent.slim import without_authorities
with without_authorities():
    from aiohttp import connector
print([name for name, value in vars(connector).items() if isinstance(value, ssl.SSLContext) and value.get_ca_certs()])
"""


def test_other_threads_get_theirs_and_later_everybody() -> None:
    usual = len(ssl.create_default_context().get_ca_certs())
    with without_authorities(), ThreadPoolExecutor() as other:
        bare = ssl.create_default_context()
        meanwhile = other.submit(ssl.create_default_context).result()
    assert bare.get_ca_certs() == []
    assert (bare.verify_mode, bare.check_hostname) == (ssl.CERT_REQUIRED, True), "it trusts nobody, not everybody"
    assert len(meanwhile.get_ca_certs()) == len(ssl.create_default_context().get_ca_certs()) == usual


def test_aiohttp_reads_none_as_the_agent_imports_it() -> None:
    if not ssl.create_default_context().get_ca_certs():
        pytest.skip("this system has no authorities")
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
