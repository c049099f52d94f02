"""Several hosts in the test's own loop: each a router with servers of its own.

`async with hosts([server], [other]) as (a, b)`, then `await a.chat(...)` and see where it went.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from router.servers.program import free_port
from tests.support.servers.router_fleet import PATIENCE_S, Fleet, running

HOST = "x-kvferry-host"


class Server(Protocol):
    """A llama-server, real or fake, that a test started."""

    @property
    def url(self) -> str: ...


@asynccontextmanager
async def hosts(
    *servers: Sequence[Server],
    kv: bool = True,
    yaml: str = "",
    redis: str | None = None,
    no_backend_s: float | None = None,
) -> AsyncIterator[list[Fleet]]:
    """Run a host for each list of servers, an empty one for a front; yield when all know all.

    The hosts are called `h0`, `h1` and so on, and their servers `h0-0` and so on.
    """
    ports = [free_port() for _ in servers]
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(
                running(
                    [(f"h{at}-{n}", server.url) for n, server in enumerate(own)],
                    {
                        f"h{at}-{n}": server.kv_dir  # type: ignore[attr-defined]
                        for n, server in enumerate(own)
                    }
                    if kv
                    else None,
                    yaml=f"{yaml}\n{fleet_yaml(at, ports, redis)}",
                    wait_for=None if own else (),
                    no_backend_s=no_backend_s,
                )
            )
            for at, own in enumerate(servers)
        ]
        for fleet in found:
            await until_peers(fleet, *(f"h{at}" for at in range(len(servers))))
        yield found


def fleet_yaml(at: int, ports: Sequence[int], redis: str | None = None) -> str:
    """Return the section `fleet` of one of several hosts on loopback."""
    if redis is not None:
        who = f"redis: {redis}"
    else:
        # Each host is in its own list: it has to find that out.
        who = f"peers: [{', '.join(f'http://127.0.0.1:{port}' for port in ports)}]"
    return f"fleet: {{name: h{at}, listen: '127.0.0.1:{ports[at]}', {who}}}"


async def until_peers(fleet: Fleet, *names: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a host can use these peers, itself left out, and no others."""

    def all_up(state: dict[str, object]) -> bool:
        told = state["hosts"]
        assert isinstance(told, dict)
        up = {peer["name"] for peer in told["peers"] if peer["up"]}
        return up == set(names) - {told["name"]}

    await fleet.until(all_up, patience_s)
