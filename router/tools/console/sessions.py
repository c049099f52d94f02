"""`kvferry sessions`: the conversations that clients name, with their tokens."""

import argparse
import asyncio
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from router.tools.console.client import connected
from router.tools.console.format import span
from router.tools.console.view import table
from router.tools.terminal import output

Json = dict[str, Any]


def sessions(options: argparse.Namespace) -> int:
    """Print the sessions of a running router. Returns 0. Raises CallError."""
    found = asyncio.run(_fetch(options.url, options.limit))
    if options.json:
        sys.stdout.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")
        return 0
    show(found["sessions"])
    return 0


async def _fetch(url: str, limit: int) -> Json:
    async with connected(url) as router:
        return await router.call("GET", "/kvferry/sessions", {"limit": str(limit)})


def show(found: list[Json]) -> None:
    """Print the sessions as a table: their requests, tokens, and last request."""
    console = output()
    if not found:
        console.print("no client has named a session: docs/clients.md lists the hints")
        return
    numbers = ("sent", "prompt", "computed", "reused")
    made = table("session", *numbers, "ago", right=(*numbers, "ago"), last="named by")
    now = datetime.now(UTC)
    for one in found:
        prompt, computed = one["prompt_tokens"], one["computed_tokens"]
        made.add_row(
            one["id"],
            f"{one['requests']:,}",
            f"{prompt:,}",
            f"{computed:,}",
            f"{100 * (prompt - computed) / prompt:.0f} %" if prompt else "-",
            span((now - datetime.fromisoformat(one["last"])).total_seconds()),
            one["named_by"],
        )
    console.print(made)
