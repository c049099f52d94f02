"""`kvferry sessions`: the conversations that clients name, with their tokens."""

import argparse
import asyncio
import sys
from typing import Any

import orjson

from router.tools.console.client import connected
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
    """Print the sessions as a table."""
    console = output()
    if not found:
        console.print("no client has named a session: docs/clients.md lists the hints")
        return
    numbers = ("requests", "prompt", "computed", "reused")
    made = table("session", *numbers, "slot", "last", right=numbers, last="named by")
    for one in found:
        prompt, computed = one["prompt_tokens"], one["computed_tokens"]
        made.add_row(
            one["id"],
            f"{one['requests']:,}",
            f"{prompt:,}",
            f"{computed:,}",
            f"{100 * (prompt - computed) / prompt:.0f} %" if prompt else "-",
            f"{one['backend']}/{one['slot']}",
            one["last"][11:19],
            one["named_by"],
        )
    console.print(made)
