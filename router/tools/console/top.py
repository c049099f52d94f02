"""`kvferry top`: backends, slots, queue and the last requests, refreshed every second."""

import asyncio
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.tools.console.client import CallError, Json, RouterClient, connected
from router.tools.console.format import bar, number_of, size, span, table
from router.tools.terminal import output

INTERVAL_S = 1.0
_DECISIONS = 20
_GOOD = {"up", "running", "idle", "resident", "snapshot", "copy"}
_BAD = {"down", "failed", "lost"}


async def top(url: str, *, once: bool) -> int:
    """Show the state until Ctrl-C; once without a terminal. Raises CallError at the start."""
    console = output()
    async with connected(url) as client:
        drawn = await picture(client)
        if once or not console.is_terminal:
            console.print(drawn)
            return 0
        await _live(console, client, drawn)
    return 0


async def _live(console: Console, client: RouterClient, drawn: RenderableType) -> None:
    """Show the state every second. Without a router show the last picture, and try again."""
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        trouble = ""
        while True:
            live.update(Group(Text(trouble, "bold red"), drawn) if trouble else drawn, refresh=True)
            await asyncio.sleep(INTERVAL_S)
            try:
                drawn, trouble = await picture(client), ""
            except CallError as error:
                trouble = f"{error}; trying again"


async def picture(client: RouterClient) -> RenderableType:
    """Return the screen of a router now. Raises CallError."""
    state, decisions = await client.state(), await client.decisions(_DECISIONS)
    clock = datetime.now().astimezone().strftime("%H:%M:%S")
    where = f"{client.url}  {clock}  {state['policy']}"
    title = Text.assemble(("kvferry ", "bold"), where, no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [title, _sums(state, decisions), "", _backends(state)]
    parts += ["", _slots(state)] if state["slots"] else []
    parts += ["", _requests(decisions)] if decisions else []
    return Group(*parts)


def _sums(state: Json, decisions: Sequence[Json]) -> Table:
    made = Table.grid(padding=(0, 2, 0, 0))
    waiting = len(state["queue"]) + state["waiting_for_backend"]
    longest = max((one["waited_s"] for one in state["queue"]), default=None)
    since = f", for up to {span(longest)}" if longest else ""
    made.add_row("queue", f"{waiting:,} waiting{since}" if waiting else "none waiting")
    told = [one for one in decisions if one.get("prompt_tokens") and "cached_tokens" in one]
    if prompt := sum(one["prompt_tokens"] for one in told):
        share = sum(one["cached_tokens"] or 0 for one in told) / prompt
        made.add_row("reuse", f"{share:.0%} of the last {number_of(len(told), 'prompt')}")
    store = state["snapshots"]
    limits = f" of {size(store['max_bytes'])}" if store["max_bytes"] > 0 else ""
    held = f"{store['count']:,}; {size(store['size_bytes'])}{limits}; {store['tokens']:,} tokens"
    made.add_row("snapshots", f"{held}; {store['evicted']:,} evicted")
    if blobs := store.get("blobs"):
        new = f"{size(blobs['new_today_bytes'])} of new tokens"
        made.add_row("disk", f"{size(blobs['today_bytes'])} written in 24 hours; {new}")
    if problem := (store.get("cold") or {}).get("problem"):
        made.add_row("cold tier", Text(problem, "red"))
    for one in state.get("servers") or ():
        waits = f", {one['waiting']:,} waiting" if one["waiting"] else ""
        made.add_row("server", Text.assemble(f"{one['name']} ", _coloured(one["phase"]), waits))
    for peer in (state.get("hosts") or {}).get("peers", ()):
        load = f"{peer['busy'] + peer['waiting']:,}/{peer['slots']:,}"
        made.add_row("host", f"{peer['name']} {load if peer['up'] else 'not used'}")
    return made


def _backends(state: Json) -> Table:
    numbers = ("n_ctx", "prefill t/s")
    made = table("backend", "", *numbers, "memory", right=numbers, wrap=True)
    made.expand = True
    for one in state["backends"]:
        standing = _coloured(str(one.get("state") or ("up" if one["up"] else "down")))
        note = one["problem"] or one.get("note") or ""
        if not one["up"]:
            made.add_row(one["name"], standing, "", "", "", Text(note, "red"))
            continue
        rate = one["rates"]["prefill_tokens_per_s"]
        told = (f"{number:,.0f}" for number in (one["n_ctx"], rate))
        note = note or ("" if one["snapshots"] else "no snapshots")
        made.add_row(one["name"], standing, *told, one["memory_kind"], note)
    return made


def _slots(state: Json) -> Table:
    limits = {one["name"]: one["n_ctx"] for one in state["backends"] if one["up"]}
    made = table("slot", "", "resident", "", right=("resident",), last="request")
    for slot in state["slots"]:
        held, limit = slot["resident_tokens"], limits.get(slot["backend"])
        idle = "" if slot["idle_s"] is None else f"idle for {span(slot['idle_s'])}"
        done = "" if slot.get("prefilled") is None else f"  {slot['prefilled']:.0%}"
        made.add_row(
            f"{slot['backend']}/{slot['index']}",
            _coloured(slot["phase"]),
            f"{held:,}",
            bar(held / limit, 16) if limit else "",
            f"{slot['request']}{done}" if slot["request"] else Text(idle, "dim"),
        )
    return made


def _requests(decisions: Sequence[Json]) -> Table:
    numbers = ("prompt", "planned", "cached", "TTFT")
    made = table("slot", "source", *numbers, right=numbers, last="reason")
    made.expand = True
    for one in decisions:
        counts = (one.get(f"{name}_tokens") for name in numbers[:3])
        outcome, told = one.get("outcome"), str(one.get("reason") or "")
        made.add_row(
            "" if one.get("backend") is None else f"{one['backend']}/{one['slot']}",
            _coloured(one.get("source") or ""),
            *("-" if count is None else f"{count:,}" for count in counts),
            span(one.get("ttft_s")),
            Text(
                told if outcome == "ok" else f"{outcome}: {told}", "" if outcome == "ok" else "red"
            ),
        )
    return made


def _coloured(word: str) -> Text:
    return Text(word, "green" if word in _GOOD else "red" if word in _BAD else "yellow")
