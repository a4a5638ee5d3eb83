"""The ``api`` section and the tokens file: what is taken, and every mistake at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.spec.configfile import parse_config
from nodeagent.spec.sections import ApiConfig, ApiTlsConfig, parse_tokens
from tests.unit.spec.helpers import check_marked

A, B = "a" * 64, "b" * 64


def parse(text: str) -> ApiConfig:
    return parse_config(text, "agent.yaml", {}, uid=0).api


def test_defaults_and_everything_given() -> None:
    assert parse("") == ApiConfig(listen=None, tls=ApiTlsConfig(), tokens=None)
    api = parse("api: {listen: 10.0.0.7, tls: {cert: /c, key: /k, client_ca: /ca}, tokens: /t}")
    assert api.listen == "10.0.0.7"
    assert api.tls == ApiTlsConfig(cert=Path("/c"), key=Path("/k"), client_ca=Path("/ca"))
    assert api.tokens == Path("/t")
    assert parse("api: {listen: off}").listen == "off"
    assert parse("api: {listen: 'fd00::7'}").listen == "fd00::7"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("api: {listen: >>0.0.0.0}", "loopback with its plain HTTP included"),
        ("api: {listen: >>'::'}", "one address of this machine"),
        ("api: {listen: >>n7.example}", "is not an address"),
        ("api: {listen: >>9470}", "is not an address"),
        ("api: {listen: >>true}", "is not an address"),
        ("api: {>>liste: off}", "did you mean 'listen'?"),
        ("api: {tokens: >>tokens.yaml}", "is not an absolute path"),
        ("api: {tls: {key: >>/k}}", "a key without a certificate"),
        ("api: {tls: {>>ca: /k}}", "unknown key 'ca'"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    check_marked(text, parse, words)


def test_tokens() -> None:
    found = parse_tokens(f"tokens:\n  ci: {{sha256: {A}, may: operate}}\n  anna: {{sha256: {B}, user: anna}}", "t.yaml")
    assert {digest: (name, t.user, t.may) for digest, (name, t) in found.items()} == {
        A: ("ci", None, "operate"), B: ("anna", "anna", None),
    }  # fmt: skip
    assert parse_tokens("tokens: {}", "t.yaml") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"tokens:\n  ci: >>{{sha256: {A}}}", "give either user, or may"),
        (f"tokens:\n  ci: >>{{sha256: {A}, user: anna, may: read}}", "give either user, or may"),
        (f"tokens:\n  ci: {{sha256: {A}, may: >>write}}", "not known here"),
        ("tokens:\n  ci: {sha256: >>secret, may: read}", "is not a SHA-256 in hex"),
        (f"tokens:\n  ci: {{sha256: >>{A[1:]}, may: read}}", "printf %s TOKEN | sha256sum"),
        (f"tokens:\n  a: {{sha256: {A}, may: read}}\n  b: {{sha256: >>{A}, may: read}}", "the same token as a"),
        (f"tokens:\n  ci: {{sha256: {A}, may: read, >>gid: 1}}", "unknown key 'gid'"),
        ("tokens: {}\n>>token: {}", "did you mean 'tokens'?"),
    ],
)
def test_mistakes_in_tokens(text: str, words: str) -> None:
    check_marked(text, lambda t: parse_tokens(t, "t.yaml"), words)


@pytest.mark.parametrize("name", ["two words", "x" * 41])
def test_names_of_tokens(name: str) -> None:
    text = f"tokens:\n  {name}: >>{{sha256: {A}, may: read}}"
    check_marked(text, lambda t: parse_tokens(t, "t.yaml"), "cannot name a token")
