"""The agent's certificate: made or configured, known by its fingerprint, and no key is left behind."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

from nodeagent.spec.sections import ApiTlsConfig
from nodeagent.trust.certificate import CertificateError, configured, fingerprint, server_context


def make(folder: Path, *more: str) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=n1"]
    words = [*command, *(more or ("-nodes",)), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(words, check=True, capture_output=True, timeout=30)
    return cert, key


def test_its_own_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    def start(folder: Path) -> tuple[ssl.SSLContext, str]:
        return asyncio.run(server_context(ApiTlsConfig(), "n1", folder))

    state = tmp_path / "state"
    context, first = start(state)
    assert context.verify_mode == ssl.CERT_NONE
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert [(p.name, stat.S_IMODE(p.stat().st_mode)) for p in state.iterdir()] == [("api.pem", 0o600)]
    assert start(state)[1] == first
    assert start(tmp_path / "other")[1] != first
    (state / "api.pem").chmod(0o644)
    second = start(state)[1]
    assert second != first, "somebody may have read the key"
    (state / "api.pem").write_text("half a cert")
    assert start(state)[1] not in (first, second)
    assert [p.name for p in state.iterdir()] == ["api.pem"]


def test_its_own_is_not_made_anew_because_it_cannot_be_read_now(tmp_path: Path) -> None:
    _, first = asyncio.run(server_context(ApiTlsConfig(), "n1", tmp_path))
    kept = (tmp_path / "api.pem").rename(tmp_path / "kept")
    (tmp_path / "api.pem").symlink_to("api.pem")
    with pytest.raises(CertificateError, match="cannot be used: Too many levels of symbolic links"):
        asyncio.run(server_context(ApiTlsConfig(), "n1", tmp_path))
    kept.replace(tmp_path / "api.pem")
    assert asyncio.run(server_context(ApiTlsConfig(), "n1", tmp_path))[1] == first


def test_a_configured_one(tmp_path: Path) -> None:
    cert, key = make(tmp_path)
    _, reported = asyncio.run(server_context(ApiTlsConfig(cert=cert, key=key), "n1", tmp_path))
    command = ["openssl", "x509", "-in", str(cert), "-noout", "-fingerprint", "-sha256"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    assert output.partition("=")[2].strip().replace(":", "").lower() == reported == fingerprint(cert.read_text())
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + cert.read_text())
    assert configured(ApiTlsConfig(cert=both))[1] == reported
    context, _ = configured(ApiTlsConfig(cert=both, client_ca=cert))
    assert context.verify_mode == ssl.CERT_OPTIONAL


def test_what_cannot_be_used(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "-passout", "pass:secret")
    with pytest.raises(CertificateError, match="its key is encrypted"):
        configured(ApiTlsConfig(cert=cert, key=key))
    with pytest.raises(CertificateError, match="not a certificate with its key"):
        configured(ApiTlsConfig(cert=cert))
    with pytest.raises(CertificateError, match=r"cert.pem2 cannot be used: No such file"):
        configured(ApiTlsConfig(cert=tmp_path / "cert.pem2"))
    cert, key = make(tmp_path)
    os.mkfifo(pipe := tmp_path / "pipe")
    for tls, named in (
        ({"cert": pipe}, "pipe cannot be used: it is"),
        ({"cert": cert, "key": pipe}, "cannot be used: its key .*pipe: it is"),
        ({"cert": cert, "key": key, "client_ca": pipe}, "the CA .*pipe cannot be used: it is"),
    ):
        with pytest.raises(CertificateError, match=f"{named} no regular file: replace it"):
            configured(ApiTlsConfig.model_validate(tls))
    with pytest.raises(CertificateError, match=r"cannot be used: its key .*key.pem2: No such file"):
        configured(ApiTlsConfig(cert=cert, key=tmp_path / "key.pem2"))
    with pytest.raises(CertificateError, match=r"the CA .* cannot be used: No such file"):
        configured(ApiTlsConfig(cert=cert, key=key, client_ca=tmp_path / "ca.pem"))
    with pytest.raises(ValueError, match="no certificate in PEM form"):
        fingerprint(key.read_text())
