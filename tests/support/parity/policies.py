"""One real server, asked directly, through a router of each policy, and through two hosts."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.support.models.tiny_models import tiny_model
from tests.support.parity.pair import Pair, client
from tests.support.servers.hosts import Addressed, hosts
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import running

DEFAULT = "prefer_idle_slot_with_global_restore"
HOP = "through a hop"  # the client's host has no server of its own
POLICIES = (DEFAULT, "passthrough", HOP)
CTX = 256  # tokens of a slot; an answer without a limit ends there


@asynccontextmanager
async def paired(server_argv: list[str], kv_dir: Path) -> AsyncIterator[dict[str, Pair]]:
    """Yield a pair for each policy; all are in front of one server, which must survive."""
    model = tiny_model("llama").path
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            LlamaServer(model, slots=2, ctx=2 * CTX, kv_dir=kv_dir, argv=server_argv)
        )
        session = await stack.enter_async_context(client())
        made = {}
        for policy in (DEFAULT, "passthrough"):
            # No snapshots: an idle save would not know of the direct requests.
            router = running([("a", server.url)], None, yaml=f"policy: {policy}")
            kvferry = await stack.enter_async_context(router)
            made[policy] = Pair(server.url, kvferry.url, session)
        without_kv = Addressed(server.url)
        _, front = await stack.enter_async_context(hosts([without_kv], []))
        made[HOP] = Pair(server.url, front.url, session)
        yield made
        assert server.pid is not None, "the server did not survive"
