"""The flags of `kvferry serve` for other hosts."""

import argparse
from pathlib import Path

from router.config.schema import FLEET_FLAGS


def add_fleet_options(command: argparse.ArgumentParser) -> None:
    """Add the flags to a command."""
    add = command.add_argument_group("other hosts").add_argument
    add(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="another host's --peer-listen; repeatable; a name may have several addresses",
    )
    add("--peer-listen", metavar="HOST:PORT", help="the address for other hosts; default: none")
    add("--redis", metavar="URL", help="a Redis or Valkey in which hosts find each other")
    add(
        "--fleet-credentials",
        metavar="DIR",
        help="what `kvferry fleet certificate` has made for this host",
    )
    add(
        "--insecure-peers", action="store_true", help="plain HTTP between hosts, for a safe network"
    )
    add("--host-name", metavar="NAME", help="the name of this host; default: the machine's")


def fleet_from(options: argparse.Namespace) -> dict[str, object] | None:
    """Return the `fleet` section for the flags; None: without any."""
    found = {key: value for key, value in _values(options).items() if value}
    if options.peer:
        found["peers"] = options.peer
    if options.fleet_credentials:
        found["credentials"] = str(Path(options.fleet_credentials).absolute())
    return found or None


def _values(options: argparse.Namespace) -> dict[str, object]:
    """Return the value of each flag but `--peer`, by its key in the section."""
    return {
        key: getattr(options, flag.removeprefix("--").replace("-", "_"))
        for key, flag in FLEET_FLAGS.items()
    }
