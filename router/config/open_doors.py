"""Warnings about a configuration that lets in more clients than an operator may expect."""

from collections.abc import Iterator

from msgspec import Struct

from router.config.schema import Config
from router.config.values import is_local


class OpenDoor(Struct, frozen=True):
    """A way in that needs no key: what is open, and what closes it."""

    what: str
    remedy: str


def open_doors(config: Config) -> Iterator[OpenDoor]:
    """Yield the ways in that need no key where one could be expected."""
    if config.auth.keys:
        return
    remedy = "make a key for each client (`kvferry key NAME`) and list it in auth.keys"
    if named := [backend.name for backend in config.backends if backend.api_key_env is not None]:
        yield OpenDoor(
            f"clients need no key, and kvferry sends its own (api_key_env) to {', '.join(named)}:"
            f" every client that reaches {config.listen} uses what these keys protect",
            remedy,
        )
    if not is_local(config.listen.host):
        yield OpenDoor(
            f"clients of other machines need no key: kvferry listens on {config.listen}",
            f"{remedy}, or listen on 127.0.0.1",
        )
