"""`kvferry explain ID`: why a request got its slot, and why prompt tokens were computed.

Asks a running router (`GET /kvferry/requests/ID`) and prints its answer for a person.
"""

from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.base.types import Miss
from router.tools.console.client import Json, ask
from router.tools.terminal import output

# Each reason, for an operator; docs/metrics.md says more.
_MEANING = {
    Miss.NEW: "new: never held before (the last token is always computed)",
    Miss.DIVERGED: "the held content continues differently from there",
    Miss.COLD: "no held content shares enough with this prompt",
    Miss.BUSY: "a busy slot held them, and the request did not wait for it",
    Miss.KIND: "shared, but a state of this memory kind cannot go back that far",
    Miss.PRICE: "usable, but another candidate was cheaper, or chosen by the policy",
    Miss.DISPLACED: "a slot held them once, and lost them without a save",
    Miss.EVICTED: "a snapshot held them once, and was evicted",
    Miss.FOREIGN: "held for this model with another projector, adapter, RoPE setting or file",
    Miss.FAILED: "planned for reuse, but a restore, a cut or a copy failed",
    Miss.MISPREDICTED: "planned for reuse, but the backend computed them",
    Miss.UNKNOWN: "the router does not know the tokens",
    Miss.DECLINED: "the client wanted no reuse, or several answers at once",
}


def explain(url: str, request: str) -> int:
    """Print all that a router knows of a request. Returns 0. Raises CallError."""
    show(ask(url, "GET", f"/kvferry/requests/{quote(request, safe='')}"), output())
    return 0


def show(told: Json, console: Console) -> None:
    """Print one request: its outcome, the computed tokens with reasons, and the candidates."""
    _line(console, f"request {told['id']}  {told['time']}  {told['outcome']}", "bold")
    if (hosts := told.get("hosts")) is not None:
        _hosts(hosts, console)
        if hosts["served_by"] is not None:
            return
    if told["plan"] is None:
        _line(console, f"  The router answered this request itself: {told['reason']}")
        return
    _line(console, f"  on {told['backend']}/{told['slot']}: {told['reason']}")
    if told["session"] is not None:
        _line(console, f"  session {told['session']}")
    _line(console, f"  {_seconds(told)}")
    console.print()
    _tokens(told, console)
    if told["nearest"] is not None:
        console.print()
        _nearest(told["nearest"], console)
    console.print()
    _ways(told["plan"], console)


def _hosts(hosts: Json, console: Console) -> None:
    """Print which hosts were asked, what they quoted, and which one served the request."""
    served_by = hosts["served_by"]
    said = "here" if served_by is None else f"by {served_by}, which has the details under this id"
    _line(console, f"  Served {said}. Hosts and their quotes:")
    table = Table(box=None, pad_edge=False)
    for heading in ("", "host", "seconds", "of it waiting", "reused", ""):
        table.add_column(heading, justify="left" if heading in ("", "host") else "right")
    fetched = hosts.get("fetched_from")
    why_here = f"fetched what the prompt begins with from {fetched}" if fetched else ""
    rows = [("this host", hosts["own"], served_by is None, why_here)]
    rows += [
        (offer["host"], offer["quote"], offer["host"] == served_by, _remark(offer))
        for offer in hosts["offers"]
    ]
    for name, told, taken, why in rows:
        numbers = ("-", "-", "-") if told is None else _quoted(told)
        table.add_row(Text("->" if taken else "  "), Text(name), *map(Text, numbers), Text(why))
    console.print(table)


def _quoted(quote: Json) -> tuple[str, str, str]:
    return f"{quote['price_s']:.3f}", f"{quote['wait_s']:.3f}", f"{quote['reused_tokens']:,}"


def _remark(offer: Json) -> str:
    if offer["refused"]:
        return "did not take it after all"
    if offer["quote"] is None:
        return "no quote in time"
    return "fetches first" if offer["quote"]["source"] == "fetched" else ""


def _seconds(told: Json) -> str:
    parts = [
        f"{name} {told[key]:.3f} s"
        for name, key in (
            ("waited", "waited_s"),
            ("prepared", "prepared_s"),
            ("in the prefill queue", "prefill_queue_s"),
            ("first token after", "ttft_s"),
            ("predicted", "predicted_s"),
            ("total", "total_s"),
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
    if not nearest["diverges"]:
        _line(console, "  One is a prefix of the other: they do not diverge.")
        return
    _line(console, f"  They diverge at token {common:,}:")
    for label, key in (("both", "before"), ("the prompt", "prompt"), ("held", "held")):
        shown = nearest[key]
        ids = " ".join(map(str, shown["ids"]))
        text = "" if shown["text"] is None else f"  {shown['text']!r}"
        _line(console, f"  {label:>10}  {ids}{text}")


def _ways(plan: Json, console: Console) -> None:
    _line(console, "Candidates and their prices, in seconds", "bold")
    table = Table(box=None, pad_edge=False)
    for heading in ("", "slot", "source", "reused", "total", "parts"):
        table.add_column(heading, justify="right" if heading in ("reused", "total") else "left")
    for way in (plan["chosen"], *plan["losers"]):
        parts = ", ".join(f"{name} {value:.3f}" for name, value in way["breakdown_s"].items())
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
