"""The state in a terminal: `/kvferry/state`, recent figures and decisions as tables.

Pure functions from JSON to renderables of rich. The tables fit 80 columns and use more if there
are more. Colours and bars are repeated as numbers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.tools.console.format import bar, number_of, size, span
from router.tools.console.rates import Recent

Json = dict[str, Any]

_STYLES = {
    "up": "green",
    "down": "red",
    "starting": "yellow",
    "failed": "red",
    "idle": "dim",
    "preparing": "yellow",
    "running": "green",
    "draining": "magenta",
    "abandoned": "magenta",
    "lost": "red",
    "resident": "green",
    "snapshot": "cyan",
    "copy": "cyan",
    "cold": "yellow",
    "none": "dim",
}
_FILLS = "·▁▂▃▄▅▆▇█"
_UNLIMITED = -1
# Lines above the rows of backends, and lines of a table besides its rows.
_LINES_ABOVE, _LINES_OF_A_TABLE = 8, 3
_WIDE = 110  # columns from which there is room for the reason of a decision


@dataclass(frozen=True, slots=True)
class View:
    """The data of one screen. `since_s`: seconds that `recent` covers; None: since the start."""

    url: str
    state: Json
    recent: Recent
    since_s: float | None
    decisions: Sequence[Json]
    at: str  # the time of day


def picture(view: View, width: int, height: int | None = None) -> RenderableType:
    """Return the screen. Slots and decisions get the lines that are left of `height`."""
    state = view.state
    parts: list[RenderableType] = [_title(view, width), _sums(view), "", _backends(state, width)]
    n_slots, n_backends = len(state["slots"]), len(state["backends"])
    room = None if height is None else height - _LINES_ABOVE - n_backends - _LINES_OF_A_TABLE
    if room is None or n_slots <= room:
        rows, slots = n_slots, _slots(state)
    else:
        rows, slots = n_backends, _many_slots(state)
    if state["slots"]:
        parts += ["", slots]
    left = None if room is None else room - rows - _LINES_OF_A_TABLE
    shown = view.decisions if left is None else view.decisions[: max(left, 0)]
    if shown:
        parts += ["", _decisions(shown, width)]
    return Group(*parts)


def _title(view: View, width: int) -> Text:
    title = Text.assemble(("kvferry ", "bold"), view.url, "  ", view.at, no_wrap=True)
    policy = f"  {view.state['policy']}"
    return title.append(policy, "dim") if len(title) + len(policy) <= width else title


def _sums(view: View) -> Table:
    recent, state = view.recent, view.state
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True, min_width=len("since start"))
    made.add_column(no_wrap=True, overflow="ellipsis")
    since = "since start" if view.since_s is None else f"last {view.since_s:.0f} s"
    requests = number_of(recent.requests, "request")
    failed = f" ({recent.failed:,} failed)" if recent.failed else ""
    median, p95 = span(recent.ttft_median_s), span(recent.ttft_p95_s)
    made.add_row(since, f"{requests}{failed}; TTFT {median} (median), {p95} (95%)")
    made.add_row("reuse", _reuse(recent))
    waiting = len(state["queue"]) + state["waiting_for_backend"]
    longest = max((one["waited_s"] for one in state["queue"]), default=None)
    waits = f"{waiting:,} waiting" if waiting else "none waiting"
    made.add_row("queue", waits + (f", for up to {span(longest)}" if longest else ""))
    made.add_row("snapshots", _store(state["snapshots"]))
    if blobs := state["snapshots"].get("blobs"):
        made.add_row("blobs", _blobs(blobs))
    if cold := state["snapshots"].get("cold"):
        made.add_row("cold tier", _cold(cold))
    if servers := state.get("servers"):
        made.add_row("servers", _servers(servers))
    if hosts := state.get("hosts"):
        made.add_row("hosts", _hosts(hosts))
    return made


def _hosts(hosts: Json) -> Text:
    """Return this host and its peers, with the requests of each for its slots."""
    made = Text(hosts["name"], "bold")
    for peer in hosts["peers"]:
        made.append("; ").append(f"{peer['name']} ")
        if peer["up"]:
            made.append(f"{peer['busy'] + peer['waiting']:,}/{peer['slots']:,}", "green")
        else:
            made.append("not used", "red")
    directory = hosts["directory"]
    if directory is not None and not directory["up"]:
        made.append("; ").append("no directory", "red")
    return made


def _servers(servers: Sequence[Json]) -> Text:
    """Return the phases of the servers on demand, with the requests that wait for each."""
    made = Text()
    for one in servers:
        waits = f" ({one['waiting']:,} waiting)" if one["waiting"] else ""
        style = _STYLES.get(one["phase"], "dim")
        made.append("; " if made else "").append(f"{one['name']} ")
        made.append(one["phase"], style).append(waits)
    return made


def _reuse(recent: Recent) -> Text:
    total = recent.prompt_tokens
    if not total:
        return Text("no prompt yet", "dim")
    parts = [("resident", recent.resident_tokens), ("snapshot", recent.snapshot_tokens)]
    reused = sum(tokens for _, tokens in parts)
    made = Text(f"{reused / total:.0%} of {total:,} prompt tokens")
    for name, tokens in parts:
        made.append("; ").append(f"{tokens / total:.0%} {name}", _STYLES[name])
    return made


def _store(store: Json) -> str:
    """Return the snapshots' totals, with the fill level of the tighter limit."""
    shares = [
        store[used] / store[limit]
        for used, limit in (("size_bytes", "max_bytes"), ("tokens", "max_tokens"))
        if store[limit] > 0
    ]
    said = [f"{store['count']:,}"]
    if shares:
        said.append(f"{bar(max(shares), 6)} {max(shares):.0%}")
    for used, limit, shown, unit in (
        ("size_bytes", "max_bytes", size, ""),
        ("tokens", "max_tokens", "{:,}".format, " tokens"),
    ):
        of = "" if store[limit] == _UNLIMITED else f" of {shown(store[limit])}"
        said.append(f"{shown(store[used])}{of}{unit}")
    return "; ".join([*said, f"{store['evicted']:,} evicted"])


def _cold(cold: Json) -> str | Text:
    """Return what the cold tier has, or what is wrong with it."""
    if cold["problem"]:
        return Text(cold["problem"], "red")
    said = [f"{number_of(cold['states'], 'state')}, {size(cold['state_bytes'])} of files"]
    said.append(f"{size(cold['written_bytes'])} written, {size(cold['fetched_bytes'])} read")
    if cold["waiting"]:
        said.append(f"{cold['waiting']:,} not copied yet")
    if bad := cold["damaged"] + cold["missing"]:
        said.append(f"{bad:,} damaged or missing")
    return ", ".join(said)


def _blobs(blobs: Json) -> str:
    """Return what blobs spare the disk, and what is wrong with them."""
    said = [f"{size(blobs['size_bytes'])} for {size(blobs['sum_bytes'])} of files"]
    said.append(f"{size(blobs['written_bytes'])} written")
    if blobs["unwritten"]:
        said.append(f"{blobs['unwritten']:,} not split yet")
    if blobs["budget_left_bytes"] == 0:
        said.append("no more may be written today")
    if blobs["damaged"]:
        said.append(f"{blobs['damaged']:,} damaged")
    return "; ".join(said)


def table(*columns: str, right: Sequence[str] = (), last: str = "", wrap: bool = False) -> Table:
    """Return a table. Column `last` takes the rest of the width; longer text is cut or wrapped."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    made.add_column(last, no_wrap=not wrap, overflow="fold" if wrap else "ellipsis", ratio=1)
    return made


def _backends(state: Json, width: int) -> Table:
    wide = width >= _WIDE
    numbers = ("slots", "n_ctx", "prefill t/s", "output t/s") if wide else ("n_ctx", "prefill t/s")
    made = table("backend", "", *numbers, "memory", right=numbers, last="", wrap=True)
    for backend in state["backends"]:
        name = backend["name"]
        standing = str(backend.get("state") or ("up" if backend["up"] else "down"))
        stands = Text(standing, _STYLES.get(standing, ""))
        if not backend["up"]:
            why = Text(str(backend["problem"] or ""), "red")
            made.add_row(name, stands, *[""] * len(numbers), "", why)
            continue
        rates, note = backend["rates"], backend["problem"] or backend["note"] or ""
        if not backend["snapshots"] and not note:
            note = "no snapshots"
        known = {
            "slots": f"{backend['slots']:,}",
            "n_ctx": f"{backend['n_ctx']:,}",
            "prefill t/s": f"{rates['prefill_tokens_per_s']:,.0f}",
            "output t/s": f"{rates['output_tokens_per_s']:,.0f}",
        }
        made.add_row(
            name,
            stands,
            *(known[number] for number in numbers),
            backend["memory_kind"],
            Text(note, "yellow" if backend["problem"] else "dim"),
        )
    made.width = width
    return made


def _slots(state: Json) -> Table:
    """Return a table with one line for each slot."""
    limits = _limits(state)
    made = table("slot", "", "resident of n_ctx", "", right=("resident of n_ctx",), last="request")
    for slot in state["slots"]:
        held, limit = _held(slot), limits.get(slot["backend"])
        phase = slot["phase"]
        made.add_row(
            f"{slot['backend']}/{slot['index']}",
            Text(phase, _STYLES.get(phase, "")),
            f"{held:,} of {limit:,}" if limit else "",
            bar(held / limit, 16) if limit else "",
            _request(slot),
        )
    return made


def _request(slot: Json) -> str | Text:
    """Return the request of a slot, and how far its prompt is computed; else for how long idle."""
    if not slot["request"]:
        return Text(_idle(slot), "dim")
    done = slot.get("prefilled")
    return str(slot["request"]) if done is None else f"{slot['request']}  {done:.0%}"


def _idle(slot: Json) -> str:
    idle_s = slot["idle_s"]
    return "" if idle_s is None else f"idle for {span(idle_s)}"


def _many_slots(state: Json) -> Table:
    """Return a table with a line for each backend, a character for each slot: its fill level."""
    limits = _limits(state)
    made = table("slots", "full", last="")
    by_backend: dict[str, list[Json]] = {}
    for slot in state["slots"]:
        by_backend.setdefault(slot["backend"], []).append(slot)
    for name, slots in by_backend.items():
        cells = Text()
        for slot in slots:
            share = _held(slot) / limits[name] if limits.get(name) else 0.0
            fill = _FILLS[min(len(_FILLS) - 1, -int(-share * (len(_FILLS) - 1) // 1))]
            cells.append(fill, _STYLES.get(slot["phase"], ""))
        phases = Counter(slot["phase"] for slot in slots)
        made.add_row(name, cells, ", ".join(f"{n} {phase}" for phase, n in phases.items()))
    return made


def _held(slot: Json) -> int:
    return int(slot["resident_tokens"])


def _limits(state: Json) -> dict[str, int]:
    return {one["name"]: one["n_ctx"] for one in state["backends"] if one["up"]}


def _decisions(decisions: Sequence[Json], width: int) -> Table:
    numbers = ("prompt", "planned", "cached", "TTFT")
    wide = width >= _WIDE
    made = table(
        "time", "slot", "source", *numbers, right=numbers, last="reason" if wide else "outcome"
    )
    for one in decisions:
        source, outcome = one.get("source") or "", str(one.get("outcome") or "")
        slot = "" if one.get("backend") is None else f"{one['backend']}/{one['slot']}"
        fine = outcome == "ok"
        words = str(one.get("reason") or "") if wide and fine else outcome
        if wide and not fine:
            words += f": {one.get('reason') or ''}"
        made.add_row(
            _time_of_day(one.get("time")),
            slot,
            Text(source, _STYLES.get(source, "")),
            *(_count(one.get(f"{name}_tokens")) for name in numbers[:3]),
            span(one.get("ttft_s")),
            Text(words, "" if fine else "red"),
        )
    made.width = width
    return made


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _time_of_day(when: object) -> str:
    """Return the local time of day of an ISO 8601 time; empty if it is none."""
    try:
        return datetime.fromisoformat(str(when)).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return ""
