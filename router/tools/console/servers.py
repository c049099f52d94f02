"""`kvferry servers list | start | stop | restart | log`: the servers that a router starts."""

import argparse
import asyncio
import sys

from rich.text import Text

from router.tools.console.client import Json, RouterClient, add_url, connected
from router.tools.console.format import print_json, span, table
from router.tools.terminal import output

PATH = "/kvferry/servers"
_POSITION = "x-kvferry-log-position"
_MOST_BYTES = 1024 * 1024  # of one answer
_POLL_S = 0.5
# An action is over in one of these phases.
_OVER = {"start": ("up", "failed"), "stop": ("stopped", "failed"), "restart": ("up", "failed")}


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = command.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="print the servers, with their phase")
    listing.add_argument("--json", action="store_true", help="print the JSON of the router")
    add_url(listing)
    listing.set_defaults(run=_run, action=_list)
    for name, doing in (
        ("start", "start a server now, without a request"),
        ("stop", "stop a server after its answers; the next request starts it again"),
        ("restart", "stop a server after its answers, and start it"),
        ("log", "print the end of a server's log"),
    ):
        action = actions.add_parser(name, help=doing)
        action.add_argument("name", metavar="NAME", help="its name in the configuration")
        if name == "log":
            action.add_argument("--bytes", type=int, default=16384, metavar="N")
            told = "print new lines as they come, until Ctrl-C"
            action.add_argument("-f", "--follow", action="store_true", help=told)
        add_url(action)
        action.set_defaults(run=_run, action=_log if name == "log" else _act, what=name)


def _run(options: argparse.Namespace) -> int:
    async def run() -> int:
        async with connected(options.url) as client:
            code: int = await options.action(client, options)
            return code

    return asyncio.run(run())


async def _list(client: RouterClient, options: argparse.Namespace) -> int:
    found = await client.call("GET", PATH)
    if options.json:
        print_json(found)
        return 0
    console = output()
    if not found["servers"]:
        console.print("this router starts no servers: give it --model, or `servers` in its file")
        return 0
    numbers = ["waiting", "load"]
    rows = table("server", "phase", *numbers, right=numbers, last="other names", wrap=True)
    for one in found["servers"]:
        names = ", ".join(name for name in one["models"] if name != one["name"])
        rows.add_row(one["name"], _phase(one), str(one["waiting"]), span(one["load_s"]), names)
    console.print(rows)
    for one in found["servers"]:
        if one["problem"]:
            console.print(Text(f"{one['name']}: {one['problem']}"), soft_wrap=True)
    return 0


def _phase(server: Json) -> str:
    since = span(server["phase_s"])
    idle = server["idle_s"]
    return f"{server['phase']} {since}" + (f", idle {span(idle)}" if idle is not None else "")


async def _act(client: RouterClient, options: argparse.Namespace) -> int:
    """Order the action, and print the phases until it is over."""
    name, what = options.name, options.what
    found = await client.call("POST", f"{PATH}/{name}/{what}")
    said, begun = "", what != "restart"
    while True:
        if found["phase"] != said:
            said = found["phase"]
            output().print(f"{name}: {said}", soft_wrap=True)
        begun = begun or said != "up"
        if begun and said in _OVER[what]:
            break
        await asyncio.sleep(_POLL_S)
        listed = (await client.call("GET", PATH))["servers"]
        found = next(one for one in listed if one["name"] == name)
    if said == "failed":
        sys.stderr.write(f"kvferry: {name}: {found['problem']}\n")
    return int(said == "failed")


async def _log(client: RouterClient, options: argparse.Namespace) -> int:
    """Print the end of a log; then its new lines until Ctrl-C, if wanted."""
    path = f"{PATH}/{options.name}/log"
    text, headers = await client.answer("GET", path, {"bytes": str(options.bytes)})
    sys.stdout.write(text.decode(errors="replace"))
    while options.follow:
        sys.stdout.flush()
        await asyncio.sleep(_POLL_S)
        query = {"after": headers[_POSITION], "bytes": str(_MOST_BYTES)}
        text, headers = await client.answer("GET", path, query)
        sys.stdout.write(text.decode(errors="replace"))
    return 0
