"""Compare answers of one real server, asked directly and through the router.

The two answers to the same request may differ in names, times, slots and counts of cached tokens.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

# Headers of a hop or of the moment.
NOT_COMPARED = {"date", "connection", "keep-alive", "transfer-encoding", "content-length"}
# Differences between two equal requests to one server: names, times, counts of cached tokens.
VARIABLE = re.compile(
    rb'("(?:created|created_at|completed_at|id_slot|tokens_cached|cached_tokens|input_tokens'
    rb"|cache_read_input_tokens|time_ms|(?:cache|prompt)_n"
    rb'|(?:prompt|predicted)_(?:ms|per_token_ms|per_second))":)[-+.\de]+'
)
NAMES = re.compile(rb"(chatcmpl-|resp_|msg_|call_|fc_|rs_|cmpl-)\w+|(\"id\":\")\w{32}\"")


@dataclass
class Seen:
    """One response as a client receives it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def compared_headers(self) -> dict[str, str]:
        return {
            name.lower(): value
            for name, value in self.headers.items()
            if name.lower() not in NOT_COMPARED and not name.lower().startswith("x-kvferry-")
        }

    @property
    def masked(self) -> bytes:
        return NAMES.sub(rb"\1\2X", VARIABLE.sub(rb"\1N", self.body))


@dataclass
class Pair:
    """The URLs of one server, directly and through the router."""

    direct: str
    routed: str
    session: aiohttp.ClientSession

    async def ask(self, method: str, path: str, **options: object) -> tuple[Seen, Seen]:
        """Send a request directly, then through the router.

        Direct first: the router's beliefs about the slots are then wrong, too.
        """
        return (
            await self.one(self.direct, method, path, **options),
            await self.one(self.routed, method, path, **options),
        )

    async def one(self, base: str, method: str, path: str, **options: object) -> Seen:
        """Send a request to one of the two."""
        async with self.session.request(method, base + path, allow_redirects=False, **options) as r:  # type: ignore[arg-type]
            return Seen(r.status, dict(r.headers), await r.read())


def client() -> aiohttp.ClientSession:
    """Return a session with a connection per request. Bodies are compared as raw bytes."""
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False)


def difference(direct: Seen, routed: Seen) -> str:
    """Return how a client could tell the two responses apart; "" if it could not."""
    framing = [
        ("Content-Length" in seen.headers, seen.headers.get("Transfer-Encoding", "").lower())
        for seen in (direct, routed)
    ]
    for what, one, two in (
        ("status", direct.status, routed.status),
        ("headers", direct.compared_headers, routed.compared_headers),
        ("framing", *framing),
        ("body", direct.masked, routed.masked),
    ):
        if one != two:
            return f"{what}: {one!r} directly, {two!r} through the router"
    return ""


def assert_equal(direct: Seen, routed: Seen) -> None:
    """Assert that there is no `difference`."""
    assert not difference(direct, routed)
