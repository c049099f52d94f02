"""Examine the other hosts and the directory, as this host would use them."""

import asyncio
import ssl
from urllib.parse import urlsplit

from router.base.clock import MonotonicClock
from router.base.errors import BackendError
from router.base.types import Namespace
from router.config.schema import Config
from router.hosts.credentials import Credentials, CredentialsError, load_credentials
from router.hosts.messages import Hello
from router.hosts.peer import Peer
from router.hosts.peers import addresses_of
from router.llama.attach.namespace import is_same
from router.llama.server_client import Connections, Timeouts
from router.tools.doctor.facts import Facts
from router.tools.doctor.findings import Finding, Level

_OLDEST_REDIS = 7
_WITHIN_S = 5.0


async def of_hosts(config: Config, all_facts: list[Facts]) -> list[Finding]:
    """Return the findings about other hosts; none without the section `fleet`."""
    section = config.fleet
    if not section.is_used:
        return []
    try:
        credentials = await asyncio.to_thread(load_credentials, section.credentials)
    except CredentialsError as error:
        return [Level.ERROR(f"fleet.credentials: {error}")]
    found = [finding for url in section.peers for finding in await _peer(url, credentials, config)]
    hellos = [hello for finding, hello in found if hello is not None]
    findings = [finding for finding, _ in found]
    findings += _models(hellos, all_facts)
    if section.redis is not None:
        findings.append(await _directory(section.redis))
    return findings


async def _peer(
    url: str, credentials: Credentials, config: Config
) -> list[tuple[Finding, Hello | None]]:
    """Return a finding, and what the host says of itself, for each address of a peer."""
    try:
        addresses = await addresses_of(url)
    except OSError as error:
        told = f"{url}: {error.strerror}"
        return [(Level.ERROR(told, "give peers as https://HOST:PORT"), None)]
    found = []
    async with Connections(credentials.client) as connections:
        for address in addresses:
            peer = Peer(address, connections, Timeouts(health_s=_WITHIN_S), MonotonicClock().now)
            found.append(await _examined(peer, credentials, config))
    return found


async def _examined(
    peer: Peer, credentials: Credentials, config: Config
) -> tuple[Finding, Hello | None]:
    try:
        hello = await peer.ask_hello()
    except BackendError as error:
        why = f"{error}"
        if isinstance(error.__cause__, ssl.SSLError):
            why = f"its certificate is not of this fleet ({error.__cause__.reason})"
        do = "is kvferry running there with --peer-listen, and the port open?"
        return Level.WARNING(f"{peer.url}: {why}", do), None
    peer.heard(hello, credentials.proof)
    if peer.problem:
        return Level.ERROR(f"{hello.name} ({peer.url}): {peer.problem}"), None
    if hello.keeps_apart != config.auth.keeps_apart:
        told = f"{hello.name}: tenants are kept apart on one of the two hosts only"
        return Level.WARNING(told, "give all hosts the same `auth`"), hello
    models = ", ".join(sorted({s.names[0].rpartition("/")[2] for s in hello.models if s.names}))
    models = models or "no model"
    told = f"{hello.name} ({peer.url}): kvferry {hello.version}, {hello.slots} slots, {models}"
    return Level.OK(told), hello


def _models(hellos: list[Hello], all_facts: list[Facts]) -> list[Finding]:
    """Return a finding for each model that other hosts have in another form."""
    found = []
    for facts in all_facts:
        if facts.attached is None:
            continue
        info = facts.attached.info
        for hello in hellos:
            for served in hello.models:
                if not info.models & set(served.names) or not served.namespace:
                    continue
                if not is_same(info.namespace, Namespace(served.namespace)):
                    told = f"{served.names[0]} on {hello.name} is another model than here"
                    do = "the same file and the same -ctk, -ctv and -fa, or another name"
                    found.append(Level.WARNING(told, do))
    return found


async def _directory(url: str, *, moves: int = 2) -> Finding:
    """Return a finding about Redis or Valkey."""
    try:
        import redis.asyncio
        from redis.exceptions import MovedError, RedisError

        from router.hosts.directory import HOSTS_KEY, at_node
    except ModuleNotFoundError:
        told = "the directory is not asked: redis is not installed"
        return Level.ERROR(told, "pip install 'kvferry[fleet]'")
    where = urlsplit(url).hostname
    try:
        async with asyncio.timeout(_WITHIN_S), redis.asyncio.Redis.from_url(url) as client:
            info = await client.info("server")
            hosts = await client.scard(HOSTS_KEY)
    except (RedisError, OSError, TimeoutError) as error:
        if isinstance(error, MovedError) and moves:  # a cluster
            return await _directory(at_node(url, error), moves=moves - 1)
        told = f"the directory at {where} does not answer: {str(error) or type(error).__name__}"
        return Level.WARNING(told, "requests are served without it")
    version = str(info.get("valkey_version") or info.get("redis_version"))
    if int(version.partition(".")[0]) < _OLDEST_REDIS:
        told = f"the directory at {where} is version {version}"
        return Level.ERROR(told, "take Redis 7.0 or later, or Valkey")
    return Level.OK(f"the directory at {where}: version {version}, {hosts} hosts")
