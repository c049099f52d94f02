"""One real server, asked directly and through a router of each policy."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from router.tools.demo.launcher import LlamaServer
from tests.support.models.tiny_models import tiny_model
from tests.support.parity.pair import Pair, client
from tests.support.servers.router_fleet import running

DEFAULT = "prefer_idle_slot_with_global_restore"
POLICIES = (DEFAULT, "passthrough")
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
        for policy in POLICIES:
            # No snapshots: an idle save would not know of the direct requests.
            router = running([("a", server.url)], None, yaml=f"policy: {policy}")
            fleet = await stack.enter_async_context(router)
            made[policy] = Pair(server.url, fleet.url, session)
        yield made
        assert server.pid is not None, "the server did not survive"
