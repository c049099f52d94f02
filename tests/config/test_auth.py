"""Section `auth`: valid and invalid settings, and the messages for them."""

import pytest

from router.base.api_keys import hash_text
from router.config.schema import ConfigError, parse
from router.tools.doctor.check import summary

GOOD, ALSO = "kvf_good", "kvf_also"


def auth(*keys: tuple[str, str, str], limits: str = "", share: str = "none") -> str:
    """Return YAML for keys `(name, key, tenant)`."""
    listed = ", ".join(
        f"{{name: {name}, tenant: {tenant}, hash: '{hash_text(key)}'}}"
        for name, key, tenant in keys
    )
    return f"auth: {{share_cache: {share}, keys: [{listed}], tenants: [{limits}]}}"


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        (auth(("a", GOOD, "x"), ("a", ALSO, "x")), "auth.keys[1].name", "also that of entry"),
        (auth(("a", GOOD, "x"), ("b", GOOD, "x")), "auth.keys[1].hash", "also that of entry"),
        (auth(("a", GOOD, "x"), limits="{name: y}"), "auth.tenants[0].name", "of no key"),
        (auth(("a", GOOD, "x"), share="some"), "auth.share_cache", "'none' or 'all'"),
        ("auth: {keys: [{hash: 'sha256:00'}]}", "auth.keys[0].name", "is required"),
        (f"auth: {{keys: [{{name: a, hash: {GOOD}}}]}}", "auth.keys[0].hash", "never the key"),
        (auth(("a", GOOD, "x")) + "\npolicy: passthrough", "policy.name", "share_cache: all"),
        (
            auth(("a", GOOD, "x"), limits="{name: x, tokens_per_day: 5}", share="all")
            + "\npolicy: passthrough",
            "auth.tenants[0].tokens_per_day",
            "has no effect",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"backends: [{{url: 'http://a:1'}}]\n{text}", "test")
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert said in found[path]
    assert GOOD not in str(caught.value)


@pytest.mark.parametrize(
    ("share", "said"),
    [("none", "not reused for other tenants"), ("all", "is reused for other tenants")],
)
def test_the_summary_counts_keys_and_tenants(share: str, said: str) -> None:
    keys = auth(("a", GOOD, "x"), ("b", ALSO, "x"), share=share)
    told = summary(parse(f"backends: [{{url: 'http://a:1'}}]\n{keys}", "test"))
    assert "Clients need a key (2 keys of 1 tenant)" in told
    assert said in told


def test_a_key_without_a_tenant_is_one_of_its_own() -> None:
    keys = f"auth: {{keys: [{{name: a, hash: '{hash_text(GOOD)}'}}]}}"
    config = parse(f"backends: [{{url: 'http://a:1'}}]\n{keys}", "test")
    assert config.auth.keys[0].tenant == "a"
    assert hash_text(GOOD)[7:] not in str(config), "it is not written into a log by accident"


def test_peers_need_credentials_where_clients_have_keys() -> None:
    """Else every program on the machine could speak for any tenant."""
    text = "backends: [{url: 'http://a:1'}]\n" + auth(("laptop", GOOD, "alice"))
    fleet = "fleet: {listen: '127.0.0.1:7', peers: ['http://127.0.0.1:8']%s}\n"
    with pytest.raises(ConfigError, match="needs `credentials` where clients have keys"):
        parse(text + "\n" + fleet % "", "test")
    assert parse(text + "\n" + fleet % ", insecure: true", "test").fleet.insecure
