"""Every form of the store's URL, and what follows from it."""

from __future__ import annotations

import pytest

from nodeagent.spec.storeconfig import RedisConfig, StoreUrl, parse


@pytest.mark.parametrize(
    ("text", "url", "shown"),
    [
        ("redis://h", StoreUrl(hosts=(("h", 6379),)), "h:6379"),
        ("redis://h:7/3", StoreUrl(hosts=(("h", 7),), db=3), "h:7"),
        ("redis://h/?db=4", StoreUrl(hosts=(("h", 6379),), db=4), "h:6379"),
        ("redis://[fe80::1]:7/", StoreUrl(hosts=(("fe80::1", 7),)), "[fe80::1]:7"),
        ("redis://ann@h", StoreUrl(hosts=(("h", 6379),), user="ann"), "h:6379"),
        ("redis://:p%40@h", StoreUrl(hosts=(("h", 6379),), password="p@"), "h:6379"),
        ("rediss://ann:b%2F:c@h/1", StoreUrl((("h", 6379),), tls=True, db=1, user="ann", password="b/:c"), "h:6379"),
        ("unix:///run/my%20redis.sock?db=2", StoreUrl(path="/run/my redis.sock", db=2), "/run/my redis.sock"),
        ("unix://ann:pw@/s", StoreUrl(path="/s", user="ann", password="pw"), "/s"),
        (
            "redis+sentinel://ann:pw@s1,s2:7,[::1]/gpus/5",
            StoreUrl((("s1", 26379), ("s2", 7), ("::1", 26379)), service="gpus", db=5, user="ann", password="pw"),
            "gpus (sentinels s1:26379, s2:7, [::1]:26379)",
        ),
        (
            "rediss+sentinel://s1/gpus",
            StoreUrl((("s1", 26379),), service="gpus", tls=True),
            "gpus (sentinels s1:26379)",
        ),
    ],
)
def test_forms(text: str, url: StoreUrl, shown: str) -> None:
    assert parse(text) == url
    assert str(url) == shown
    assert "pw" not in repr(url)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (RedisConfig(), 0),
        (RedisConfig(replicas=2), 2),
        (RedisConfig(url="redis+sentinel://s/m"), 1),
        (RedisConfig(url="redis+sentinel://s/m", replicas=0), 0),
    ],
)
def test_replicas_are_waited_for_where_they_matter(config: RedisConfig, wanted: int) -> None:
    assert config.replicas_wanted == wanted
