"""`kvferry usage`: what tenants used, by day, tenant and model."""

import argparse
import csv
import sys
from collections.abc import Iterator

from router.tools.console.client import Json, add_url, ask
from router.tools.console.format import print_json, table
from router.tools.terminal import output

_KEYS = ("day", "tenant", "model")
_COLUMNS = (
    *("requests", "failed", "prompt_tokens", "cached_tokens", "computed_tokens"),
    *("generated_tokens", "server_s"),
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("--days", type=int, default=30, metavar="N", help="today included")
    told = "what each row is of, comma-separated: day, tenant, model"
    command.add_argument("--by", default="tenant,model", type=_keys, metavar="KEYS", help=told)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")
    add_url(command)
    command.set_defaults(run=usage)


def usage(options: argparse.Namespace) -> int:
    """Print the usage that a running router knows of. Returns 0. Raises CallError."""
    found = ask(options.url, "GET", "/kvferry/usage", {"days": str(options.days)})
    rows = list(by(found["usage"], options.by))
    if options.json:
        print_json(rows)
    elif options.csv:
        made = csv.DictWriter(sys.stdout, [*options.by, *_COLUMNS])
        made.writeheader()
        made.writerows(rows)
    else:
        _show(rows, options.by)
    return 0


def by(rows: list[Json], keys: list[str]) -> Iterator[Json]:
    """Yield the rows summed over all but some of their keys, the most computed first."""
    found: dict[tuple[str, ...], Json] = {}
    for row in rows:
        name = tuple(row[key] for key in keys)
        sums = found.setdefault(name, dict(zip(keys, name, strict=True)))
        for what, value in row.items():
            if what not in _KEYS:
                sums[what] = sums.get(what, 0) + value
    yield from sorted(found.values(), key=lambda row: -row["computed_tokens"])


def _keys(text: str) -> list[str]:
    keys = text.split(",")
    if not keys or not set(keys) <= set(_KEYS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(_KEYS)}")
    return keys


def _show(rows: list[Json], keys: list[str]) -> None:
    console = output()
    if not rows:
        console.print("no request has been answered in this time")
        return
    numbers = ("sent", "prompt", "reused", "computed", "generated", "server s")
    made = table(*keys, *numbers, right=numbers)
    for row in rows:
        made.add_row(
            *(row[key] or "-" for key in keys),
            *(f"{row[name]:,.0f}" for name in _COLUMNS if name != "failed"),
        )
    console.print(made)
