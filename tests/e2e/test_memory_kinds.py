"""Every memory kind, with every move of a conversation: KV is reused and answers are right.

A first turn is computed in one place. Then its next turn, the same request again and a sibling
(same system prompt, another question) are sent to another place. The answers are those of a slot
that was never moved.
"""

from dataclasses import dataclass

import pytest

from tests.conftest import StartServer
from tests.support.conversations.measuring import direct
from tests.support.conversations.prompts import Json
from tests.support.conversations.turns import (
    Reference,
    ask_all,
    first_saved,
    first_turn,
    named,
    tiny_talk,
)
from tests.support.models.tiny_models import KINDS
from tests.support.servers.running_router import running


@dataclass(frozen=True)
class Shape:
    """Division of a server's KV: number of slots and flags."""

    slots: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """The servers of the first turn and of the requests after it."""

    home: Shape
    away: Shape | None = None  # a second server
    moves: bool = True
    busy: bool = False  # meanwhile the first slot runs another request
    restart: bool = False  # router and server stop in between


ONE, TWO, UNIFIED = Shape(1), Shape(2), Shape(4, ("--kv-unified",))
PLACES = {
    "same-slot": Place(ONE, moves=False),
    "other-slot": Place(TWO, busy=True),
    "other-server": Place(ONE, ONE, busy=True),
    "restart": Place(ONE, restart=True),
    "np2-np1": Place(TWO, ONE),
    "np1-np2": Place(ONE, TWO),
    "np2-unified": Place(TWO, UNIFIED),
    "unified-np2": Place(UNIFIED, TWO),
}
# A unified state is laid out as that of `-np 1`, and a recurrent one has no layout.
_SLOW = {(kind, place) for kind in KINDS for place in ("np2-unified", "unified-np2")}
_SLOW -= {("llama", "np2-unified"), ("gemma3", "unified-np2")}


def _mark(kind: str, place: str) -> list[pytest.MarkDecorator]:
    """Return the tier of a cell: `make test` moves each kind to another server once."""
    if (kind, place) in _SLOW:
        return [pytest.mark.slow]
    return [] if place == "other-server" else [pytest.mark.thorough]


CELLS = [pytest.param(kind, place, marks=_mark(kind, place)) for kind in KINDS for place in PLACES]


@pytest.mark.parametrize(("kind", "place"), CELLS)
async def test_reuse_and_fidelity(llama_server: StartServer, kind: str, place: str) -> None:
    where, talk = PLACES[place], tiny_talk(kind)
    home = await named(llama_server, kind, "a", where.home.flags, slots=where.home.slots)
    backends = [("a", home.url)]
    away: Json = {}
    if where.away is not None:
        other = await named(llama_server, kind, "b", where.away.flags, slots=where.away.slots)
        backends.append(("b", other.url))
        away = {"model": "b"}
    unmoved = await llama_server(kind, slots=1, ctx=8192)
    async with direct(unmoved) as client:
        reference = Reference(client, kind)
        async with running(backends, home.kv_dir) as kvferry:
            first = await first_turn(kvferry, talk)
            if where.busy and not away:
                away = {"id_slot": 1 - first.answer.slot[1]}
            if where.moves:
                await first_saved(kvferry, talk, first)
            if not where.restart:
                await ask_all(
                    kvferry, reference, talk, first, away, busy=where.busy, stranger=where.moves
                )
                return
        await home.restart()
        async with running(backends, home.kv_dir) as kvferry:
            await ask_all(kvferry, reference, talk, first, away)
