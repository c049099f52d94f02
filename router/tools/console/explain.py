"""`kvferry explain ID`: why a request went where it went, and why the rest of it was computed.

Asks a running router (`GET /kvferry/requests/ID`) and prints its answer for a person.
"""

import asyncio
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.base.types import Miss
from router.tools.console.client import connected
from router.tools.terminal import output

Json = dict[str, Any]

_TIMEOUT_S = 60.0  # rendering a long chat a few times takes a backend seconds

# What each reason means to somebody who wants fewer of these; docs/metrics.md has more.
_MEANING = {
    Miss.NEW: "new: nobody had them before (the last token is always computed)",
    Miss.DIVERGED: "what was held goes on otherwise from there",
    Miss.COLD: "nothing that was held shares enough with this prompt",
    Miss.BUSY: "a busy slot held them, and was not waited for",
    Miss.KIND: "shared, but a state of this memory kind cannot go back to there",
    Miss.PRICE: "usable, but another way was cheaper, or the policy's",
    Miss.DISPLACED: "a slot held them once, and gave them up unsaved",
    Miss.EVICTED: "a snapshot held them once, and was evicted",
    Miss.FAILED: "to be reused, but a restore, a cut or a copy failed",
    Miss.MISPREDICTED: "to be reused, and the backend computed them all the same",
    Miss.UNKNOWN: "the router does not know the tokens",
    Miss.DECLINED: "the client wanted no reuse, or several answers at once",
}


_PLACES = {
    "tools": "in the tools",
    "template": "in what the template puts before the first message",
    "answer": "where the answer begins",
}


def explain(url: str, request: str) -> int:
    """Print what a router knows of a request. Returns 0. Raises CallError."""
    show(asyncio.run(fetch(url, request)), output())
    return 0


async def fetch(url: str, request: str) -> Json:
    """The router's answer. Raises CallError."""
    async with connected(url) as router:
        path = f"/kvferry/requests/{quote(request, safe='')}"
        return await router.call("GET", path, timeout_s=_TIMEOUT_S)


def show(told: Json, console: Console) -> None:
    """Print one request: how it ended, what was computed and why, and what else there was."""
    _line(console, f"request {told['id']}  {told['time']}  {told['outcome']}", "bold")
    if told["plan"] is None:
        _line(console, f"  The router answered it itself: {told['reason']}")
        return
    _line(console, f"  on {told['backend']}/{told['slot']}: {told['reason']}")
    _line(console, f"  {_seconds(told)}")
    console.print()
    _tokens(told, console)
    if told["nearest"] is not None:
        console.print()
        _nearest(told["nearest"], console)
    console.print()
    _ways(told["plan"], console)


def _seconds(told: Json) -> str:
    parts = [
        f"{name} {told[key]:.3f} s"
        for name, key in (
            ("waited", "waited_s"),
            ("prepared", "prepared_s"),
            ("of that in line", "stood_s"),
            ("first token after", "ttft_s"),
            ("predicted", "predicted_s"),
            ("all", "total_s"),
        )
        if told[key] is not None
    ]
    return ", ".join(parts)


def _tokens(told: Json, console: Console) -> None:
    prompt, computed = told["prompt_tokens"], told["computed_tokens"]
    if prompt is None or computed is None:
        _line(console, "The backend did not say how many tokens it computed.", "bold")
        return
    _line(
        console,
        f"{prompt:,} prompt tokens: {prompt - computed:,} reused of {told['planned_tokens']:,} "
        f"planned, {computed:,} computed",
        "bold",
    )
    for reason, tokens in sorted(told["missed"].items(), key=lambda pair: -pair[1]):
        meaning = _MEANING.get(reason, "")
        _line(console, f"  {tokens:>8,}  {reason:<12}  {meaning}")


def _nearest(nearest: Json, console: Console) -> None:
    slot, common, held = nearest["slot"], nearest["common_tokens"], nearest["held_tokens"]
    name = f"slot {slot['backend']}/{slot['index']}" if slot else f"snapshot {nearest['snapshot']}"
    _line(console, f"Nearest: {name}, which shared {common:,} of its {held:,} tokens", "bold")
    if not nearest["parts"]:
        _line(console, "  One is the beginning of the other: they do not part.")
        return
    _line(console, f"  They part at token {common:,}{_place(nearest)}")
    for label, key in (("both", "before"), ("the prompt", "prompt"), ("held", "held")):
        shown = nearest[key]
        ids = " ".join(map(str, shown["ids"]))
        text = "" if shown["text"] is None else f"  {shown['text']!r}"
        _line(console, f"  {label:>10}  {ids}{text}")


def _place(nearest: Json) -> str:
    part = nearest["part"]
    if part is None:
        return f" (in which message is not known: {nearest['part_unknown']})"
    if part["what"] == "message":
        return f", in message {part['index'] + 1} of {part['n_messages']} ({part['role']})"
    return f", {_PLACES[part['what']]}"


def _ways(plan: Json, console: Console) -> None:
    _line(console, "Ways that were priced, in seconds", "bold")
    table = Table(box=None, pad_edge=False)
    for heading in ("", "slot", "source", "reused", "total", "of which"):
        table.add_column(heading, justify="right" if heading in ("reused", "total") else "left")
    for way in (plan["chosen"], *plan["losers"]):
        parts = ", ".join(f"{name} {value:.3f}" for name, value in way["parts_s"].items())
        table.add_row(
            Text("->" if way is plan["chosen"] else "  "),
            Text(f"{way['backend']}/{way['slot']}"),
            Text(way["source"] + (" (later)" if way["waits_for"] else "")),
            Text(f"{way['reused_tokens']:,}"),
            Text(f"{way['total_s']:.3f}"),
            Text(parts),
        )
    console.print(table)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
