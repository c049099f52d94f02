"""The command `kvferry fleet`."""

import argparse
import asyncio
import sys
from pathlib import Path

from router.config import values
from router.tools.console.client import add_url
from router.tools.console.hosts import drain_host, status


def add_fleet_commands(command: argparse.ArgumentParser) -> None:
    """Add the commands below `kvferry fleet`."""
    commands = command.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("certificate", help="make the credentials of a host")
    one.add_argument("host", metavar="HOST", help="its name")
    one.add_argument(
        "--directory",
        type=Path,
        default=Path("fleet"),
        metavar="DIR",
        help="with the authority; made by the first call; default %(default)s",
    )
    one.add_argument("--renew", action="store_true", help="replace its certificate")
    one.set_defaults(run=_certificate)
    one = commands.add_parser("status", help="show the hosts as one of them sees them")
    one.add_argument("--json", action="store_true", help="print the JSON of the router")
    add_url(one)
    one.set_defaults(run=lambda o: asyncio.run(status(o.url, as_json=o.json)))
    for name, doing in (
        ("drain", "send no new requests to this host's servers; its clients go to other hosts"),
        ("undrain", "use this host's servers again"),
    ):
        one = commands.add_parser(name, help=doing)
        add_url(one)
        undo = name == "undrain"
        one.set_defaults(run=lambda o, undo=undo: asyncio.run(drain_host(o.url, undo=undo)))


def _certificate(options: argparse.Namespace) -> int:
    try:
        from router.tools.fleet.certificate import make_certificate
    except ModuleNotFoundError:
        sys.stderr.write(
            "kvferry: to make certificates needs `pip install 'kvferry[fleet]'`; any machine will"
            " do, not only the hosts\n"
        )
        return 2
    try:
        values.name(options.host)
    except ValueError as error:
        sys.stderr.write(f"kvferry: {options.host!r} {error}\n")
        return 2
    made = make_certificate(options.directory, options.host, renew=options.renew)
    sys.stdout.write(
        f"The credentials of {options.host} are in {made}.\n"
        f"Copy this directory to the host, and start kvferry there with\n\n"
        f"  --peer-listen 0.0.0.0:8089 --fleet-credentials DIR --peer https://OTHER:8089\n\n"
        f"{options.directory / 'authority.key'} stays here: a host that has it can admit others.\n"
    )
    return 0
