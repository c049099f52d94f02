"""Folders and ports of containers, as compose, podman and docker write them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from router.tools.serving.commands import ServerFlags
from router.tools.serving.variables import expanded

_PUBLISHED = re.compile(r"(?:\[?([\d.:a-f]+?)\]?:)?([1-9]\d*):(\d+)(?:/tcp)?")


def folders(volumes: Iterable[object], folder: Path, known: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders outside of a container by the paths inside."""
    found: dict[str, Path] = {}
    for one in volumes:
        told = (
            [str(one.get("source")), str(one.get("target"))]
            if isinstance(one, dict)
            else expanded(str(one), known).split(":")
        )
        if len(told) > 1 and told[0][:1] in ("/", ".", "~"):
            found[told[1]] = folder / Path(told[0]).expanduser()
    return found


def mounted(word: str, mounts: Mapping[str, Path]) -> str:
    """Return a word with the path outside of a container."""
    for inside, outside in mounts.items():
        if word == inside or word.startswith(inside.rstrip("/") + "/"):
            return str(outside) + word[len(inside.rstrip("/")) :]
    return word


def published(ports: Iterable[str], server: ServerFlags) -> str:
    """Return the address at which a container's server is published; "": it is at none."""
    inside = server.listens.get("--port") or "8080"
    for match in filter(None, map(_PUBLISHED.fullmatch, ports)):
        if match[3] == inside:
            host = match[1] or "0.0.0.0"  # noqa: S104 - as it was published
            return f"{f'[{host}]' if ':' in host else host}:{match[2]}"
    return ""


def short_port(given: object) -> str:
    """Return a published port in its short form."""
    if not isinstance(given, dict):
        return str(given)
    parts = (given.get("host_ip"), given.get("published"), given.get("target"))
    return ":".join(str(part) for part in parts if part) + f"/{given.get('protocol') or 'tcp'}"
