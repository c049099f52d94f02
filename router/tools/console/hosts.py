"""`kvferry fleet status | drain | undrain`: the hosts as one of them sees them."""

from rich.table import Table
from rich.text import Text

from router.tools.console.client import CallError, Json, connected
from router.tools.console.format import print_json, table
from router.tools.console.operations import drain, undrain
from router.tools.terminal import output


async def status(url: str, *, as_json: bool) -> int:
    """Print the hosts. Raises CallError."""
    async with connected(url) as client:
        hosts = (await client.state()).get("hosts")
    if hosts is None:
        raise CallError(
            "this kvferry knows no other hosts: start it with --peer or --redis (docs/hosts.md)"
        )
    if as_json:
        print_json(hosts)
        return 0
    console = output()
    console.print(hosts_table(hosts))
    for peer in hosts["peers"]:
        if peer["problem"]:
            console.print(Text(f"{peer['name']}: {peer['problem']}"), soft_wrap=True)
    console.print(Text(directory_line(hosts["directory"])), soft_wrap=True)
    return 0


def hosts_table(hosts: Json) -> Table:
    """Return a row for each peer of a host."""
    numbers = ("slots busy", "waiting", "quotes", "failed", "ms", "late s")
    rows = table(f"peer of {hosts['name']}", "", *numbers, right=numbers, last="models", wrap=True)
    for peer in hosts["peers"]:
        up = "up" if peer["up"] else "not used"
        rows.add_row(
            peer["name"],
            Text(up, "green" if peer["up"] else "red"),
            f"{peer['busy']} of {peer['slots']}",
            *(str(peer[key]) for key in ("waiting", "quotes", "failed")),
            f"{peer['quote_ms']:.1f}",
            f"{peer['late_s']:.2f}",
            ", ".join(model.rpartition("/")[2] for model in peer["models"]),
        )
    return rows


def directory_line(directory: Json | None) -> str:
    """Return the line about the directory."""
    if directory is None:
        return "directory: none (--redis)"
    if not directory["up"]:
        return f"directory: not used: {directory['problem']}; requests are served without it"
    return "directory: up"


async def drain_host(url: str, *, undo: bool) -> int:
    """Drain every backend of a host, one after the other; `undo`: use them again.

    The host goes on as a front door: its clients are served by other hosts. Raises CallError.
    """
    async with connected(url) as client:
        names = [backend["name"] for backend in (await client.state())["backends"]]
    if not names:
        raise CallError("this host has no backends of its own")
    for name in names:
        await (undrain(url, name) if undo else drain(url, name))
    return 0
