"""`kvferry snapshots list | show ID | purge`: the options, the calls and the output.

The router checks and applies filters: their values are sent as they were typed.
"""

import argparse
import sys

from rich.console import Console
from rich.text import Text

from router.tools.console.client import Json, add_url, ask
from router.tools.console.format import number_of, print_json, size, span, table
from router.tools.terminal import output

PATH = "/kvferry/snapshots"
_WIDE = 110  # columns from which the table shows the file
_LONG_S = 700.0  # for a purge of all hosts: each has its limit
_SHORT = 12  # digits that identify an id or a namespace


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = command.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="print a table of snapshots")
    _filter_options(listing)
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="default: 50")
    showing = actions.add_parser("show", help="print all that is known of a snapshot")
    showing.add_argument("id", metavar="ID", help="the id, or at least its first six digits")
    purging = actions.add_parser("purge", help="delete snapshots; asks first")
    _filter_options(purging)
    purging.add_argument("--all", action="store_true", help="all snapshots, instead of a condition")
    purging.add_argument(
        "--everywhere",
        action="store_true",
        help="with --tenant: also on all other hosts and in the cold tier",
    )
    purging.add_argument("--yes", action="store_true", help="do not ask")
    purging.add_argument("--dry-run", action="store_true", help="print the totals, purge nothing")
    runs = ((listing, _list), (showing, _show), (purging, _purge))
    for action, run in runs:
        action.add_argument("--json", action="store_true", help="print the JSON of the router")
        add_url(action)
        action.set_defaults(run=run)


def _filter_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--tenant", metavar="NAME", help="of this tenant, in all namespaces")
    add("--older-than", metavar="TIME", help="saved longer ago than this: 30m, 12h, 48h")
    add("--id", action="append", metavar="ID", help="with this id; repeatable")


def _wanted(options: argparse.Namespace) -> Json:
    """Return the given conditions as JSON."""
    given = {name: getattr(options, name) for name in ("tenant", "older_than", "id")}
    return {name: value for name, value in given.items() if value is not None}


def _list(options: argparse.Namespace) -> int:
    query = _wanted(options) | {"limit": str(options.limit)}
    if options.id:
        query["id"] = ",".join(options.id)
    found = ask(options.url, "GET", PATH, query)
    if options.json:
        print_json(found)
    else:
        _print_table(output(), found["snapshots"], found)
    return 0


def _print_table(console: Console, rows: list[Json], found: Json) -> None:
    wide = console.width >= _WIDE
    numbers = ("tokens", "size", "age", "idle", "uses")
    made = table("id", *numbers, "", right=numbers, last="file" if wide else "namespace")
    for row in rows:
        made.add_row(
            row["id"][:_SHORT],
            f"{row['tokens']:,}",
            size(row["size_bytes"]),
            span(row["age_s"]),
            span(row["idle_s"]),
            f"{row['uses']:,}",
            Text("in use", "yellow") if row["in_use"] else "",
            f"{row['kv_dir']}/{row['file']}" if wide else row["namespace"][:_SHORT],
        )
    if rows:
        console.print(made)
    shown = f", {len(rows):,} shown (--limit)" if len(rows) < found["count"] else ""
    console.print(f"{_amount(found)}{shown}", soft_wrap=True)


def _amount(sums: Json) -> str:
    number = number_of(sums["count"], "snapshot")
    tokens = number_of(sums["tokens"], "token")
    return f"{number}, {size(sums['size_bytes'])}, {tokens}" if sums["count"] else number


def _show(options: argparse.Namespace) -> int:
    row = ask(options.url, "GET", f"{PATH}/{options.id}")
    console = output()
    if options.json:
        print_json(row)
        return 0
    idle = "not since it was saved or found" if row["idle_s"] is None else span(row["idle_s"])
    lines = {
        "id": row["id"],
        "namespace": row["namespace"],
        "tokens": f"{row['tokens']:,}, beginning with {' '.join(map(str, row['prefix_ids']))}",
        "size": f"{size(row['size_bytes'])} ({row['size_bytes']:,} bytes)",
        "shape": _shape(row),
        "saved": f"{span(row['age_s'])} ago",
        "last restored": idle if row["idle_s"] is None else f"{idle} ago",
        "uses": f"{row['uses']:,}, the save among them"
        + (f"; {row['in_use']:,} at this moment" if row["in_use"] else ""),
        "file": f"{row['kv_dir']}/{row['file']}",
    }
    for name, text in lines.items():
        console.print(Text.assemble((f"{name:<14}", "bold"), text), soft_wrap=True)
    return 0


def _shape(row: Json) -> str:
    said = [number_of(row["n_stream"], "KV stream")]
    said.append("can be extended" if row["extendable"] else "can only be used up to a checkpoint")
    if row["checkpoints"]:
        said.append(f"checkpoints at {', '.join(f'{n:,}' for n in row['checkpoints'])}")
    if row["media"]:
        said.append("media")
    return "; ".join(said)


def _purge(options: argparse.Namespace) -> int:
    """Purge after a dry run and a question; return the exit code.

    The question is asked outside the event loop. Inside, the loop would wait for the thread that
    reads, and Ctrl-C for the loop.
    """
    wanted = _wanted(options) | {
        name: True for name in ("all", "everywhere") if getattr(options, name)
    }
    would = ask(options.url, "POST", f"{PATH}/purge", body=wanted | {"dry_run": True})
    if options.dry_run or not (would["count"] or options.everywhere):
        _report(options, would, "would be purged" if options.dry_run else "purged")
        return 0
    if not options.yes and not _agreed(would, options):
        return 1
    done = ask(options.url, "POST", f"{PATH}/purge", body=wanted, timeout_s=_LONG_S)
    _report(options, done, "purged")
    return 1 if any(one["problem"] for one in done["elsewhere"]) else 0


def _agreed(would: Json, options: argparse.Namespace) -> bool:
    """Return True if the operator agrees; False without a terminal to ask on."""
    if not sys.stdin.isatty():
        sys.stderr.write(f"{_amount(would)}: no terminal to ask on; use --yes\n")
        return False
    try:
        there = " here, and all on other hosts and in the cold tier" * options.everywhere
        sys.stderr.write(f"Purge {_amount(would)}{there}? [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        sys.stderr.write("\n")  # else the shell's prompt follows the question on its line
        raise


def _report(options: argparse.Namespace, sums: Json, done: str) -> None:
    console = output()
    if options.json:
        print_json(sums)
        return
    later = f"; {sums['in_use']:,} in use, to be deleted after use" * bool(sums["in_use"])
    console.print(f"{_amount(sums)} {done}{later}", soft_wrap=True)
    for one in sums["elsewhere"]:
        told = f"{one['count']:,} deleted" if one["problem"] is None else "not reached: "
        problem = Text(one["problem"] or "", "red")
        console.print(Text.assemble(f"{one['holder']}: {told}", problem), soft_wrap=True)
