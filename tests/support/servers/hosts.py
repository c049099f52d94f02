"""Several hosts in the test's own loop: each a router with servers of its own.

`async with hosts([server], [other]) as (a, b)`, then `await a.chat(...)` and see where it went.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from router.servers.program import free_port
from tests.support.servers.running_router import PATIENCE_S, RunningRouter, running

HOST = "x-kvferry-host"


class Server(Protocol):
    """A llama-server, real or fake, that a test started."""

    @property
    def url(self) -> str: ...
    @property
    def kv_dir(self) -> Path | None: ...


@dataclass(frozen=True)
class Addressed:
    """A server at an address, without snapshots."""

    url: str
    kv_dir: Path | None = None


@asynccontextmanager
async def hosts(
    *servers: Sequence[Server],
    yaml: str = "",
    redis: str | None = None,
    credentials: Path | None = None,
    **options: Any,
) -> AsyncIterator[list[RunningRouter]]:
    """Run a host for each list of servers, an empty one for a front; yield when all know all.

    The hosts are called `h0`, `h1` and so on, and their servers `h0-0` and so on. `credentials`:
    a directory with those of each host. `options`: of `running`. HOST in `yaml` is a host's name.
    """
    ports = [free_port() for _ in servers]
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(
                host(at, own, fleet_yaml(at, ports, redis, credentials), yaml, **options)
            )
            for at, own in enumerate(servers)
        ]
        n_models = {
            f"h{at}": len(set(kvferry.router.selection.names())) for at, kvferry in enumerate(found)
        }

        def all_tell_models(state: dict[str, Any]) -> bool:
            """A host is up before its servers are, and tells of them two seconds later."""
            peers = state["hosts"]["peers"]
            return all(len(peer["models"]) == n_models.get(peer["name"]) for peer in peers)

        for kvferry in found:
            await until_peers(kvferry, *(f"h{at}" for at in range(len(servers))))
            await kvferry.until(all_tell_models)
        yield found


def host(at: int, servers: Sequence[Server], fleet: str, yaml: str = "", **options: Any) -> Any:
    """Return the context manager of one host; `fleet`: that section of its configuration."""
    named = {f"h{at}-{n}": server for n, server in enumerate(servers)}
    return running(
        [(name, server.url) for name, server in named.items()],
        {name: server.kv_dir for name, server in named.items() if server.kv_dir is not None},
        yaml=f"{yaml.replace('HOST', f'h{at}')}\n{fleet}",
        **({"wait_for": None if servers else ()} | options),
    )


def fleet_yaml(
    at: int, ports: Sequence[int], redis: str | None = None, credentials: Path | None = None
) -> str:
    """Return the section `fleet` of one of several hosts on loopback."""
    scheme = "http" if credentials is None else "https"
    # Each host is in its own list: it has to find that out.
    peers = ", ".join(f"{scheme}://127.0.0.1:{port}" for port in ports)
    others = f"peers: [{peers}]" if redis is None else f"redis: {redis}"
    # Where clients have keys, plain HTTP between hosts has to be allowed.
    secrets = ", insecure: true" if credentials is None else f", credentials: {credentials}/h{at}"
    return f"fleet: {{name: h{at}, listen: '127.0.0.1:{ports[at]}', {others}{secrets}}}"


async def until_peers(kvferry: RunningRouter, *names: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a host can use these peers, itself left out, and no others."""

    def all_up(state: dict[str, Any]) -> bool:
        up = {peer["name"] for peer in state["hosts"]["peers"] if peer["up"]}
        return bool(up == set(names) - {state["hosts"]["name"]})

    await kvferry.until(all_up, patience_s)
