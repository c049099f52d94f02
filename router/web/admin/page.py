"""The live page's files, from memory: `router/web/admin/static/`, plain HTML, CSS and JavaScript.

The page loads everything from its own server: the policy below lets a browser load nothing else
and run no inline script, whatever content of a request the page shows.
"""

from dataclasses import dataclass
from importlib.resources import files

from aiohttp import web
from xxhash import xxh3_128_hexdigest

from router.web.server.call import Call
from router.web.server.error_responses import OWN_HEADERS

PREFIX = "/kvferry/"

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = OWN_HEADERS | {
    # Browsers keep the files but revalidate them: a new router version shows its new page at once.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page as it is sent."""

    content: bytes
    content_type: str
    etag: str

    async def answer(self, call: Call) -> web.Response:
        """Answer with the file, or with 304 if the browser has it."""
        headers = _HEADERS | {"ETag": self.etag}
        known = call.http.headers.get("If-None-Match", "")
        if known == "*" or self.etag in (
            tag.strip().removeprefix("W/") for tag in known.split(",")
        ):
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=self.content, headers=headers, content_type=self.content_type, charset="utf-8"
        )


async def to_page(_: Call) -> web.StreamResponse:
    """Redirect `/kvferry` to the page.

    The target is relative, since a proxy may have put a path before it.
    """
    return web.Response(status=308, headers=OWN_HEADERS | {"Location": PREFIX.lstrip("/")})


def load_page() -> dict[str, StaticFile]:
    """Return all files by the path that they are served at. Blocking: call it in a thread."""
    found = {}
    for path in files("router.web.admin").joinpath("static").iterdir():
        content_type = _TYPES.get(path.name.rpartition(".")[2])
        if content_type is None:
            continue
        content = path.read_bytes()
        name = "" if path.name == "index.html" else path.name
        found[PREFIX + name] = StaticFile(content, content_type, f'"{xxh3_128_hexdigest(content)}"')
    return found
