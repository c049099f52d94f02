"""A whole router in the test's own loop, in front of servers that the test started.

`async with running([("a", fake.url)], kv_dir) as kvferry`, then `kvferry.chat(...)`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml as pyyaml
from msgspec.structs import replace

from router.assembly.router import Router, build, listening
from router.base.ports import Tracing
from router.base.types import Standing
from router.config.schema import Config, parse

Json = dict[str, Any]

# Short intervals, so that tests do not wait long.
DEFAULTS = """
listen: 127.0.0.1:0
store: {idle_save_after: 100ms, fsync: false, min_free: 0}
health: {interval: 200ms}
shutdown_grace: 5s
"""
# Real servers start and probe in a second; a busy machine takes longer.
PATIENCE_S = 60.0
# A probe computes prompts: with real models, on cores that others use, it takes a minute.
UP_PATIENCE_S = 150.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Answer:
    """One response, read to its end. `events`: the JSON events of a stream, in order."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    json: Json
    events: list[Json] = field(default_factory=list)

    @property
    def _parts(self) -> list[Json]:
        return self.events or [self.json]

    def _last(self, key: str) -> Json:
        found: list[Json] = [part[key] for part in self._parts if part.get(key)]
        return found[-1] if found else {}

    @property
    def usage(self) -> Json:
        """Return the usage that the server reported; empty if it reported none."""
        return self._last("usage")

    @property
    def timings(self) -> Json:
        """Return the timings that the server reported; empty if it reported none."""
        return self._last("timings")

    @property
    def cached(self) -> int:
        """Return the number of prompt tokens that were not computed for this request."""
        if "cache_n" in self.timings:
            return int(self.timings["cache_n"])
        return int(self.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))

    @property
    def prompt_tokens(self) -> int:
        """Return the number of all tokens of the prompt."""
        if "cache_n" in self.timings:
            return int(self.timings["cache_n"] + self.timings["prompt_n"])
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def text(self) -> str:
        """Return the generated text, in any of the dialects."""
        return "".join(_text(part) for part in self._parts)

    @property
    def slot(self) -> tuple[str, int]:
        """Return backend and index of the slot that the router chose."""
        return self.headers["x-kvferry-backend"], int(self.headers["x-kvferry-slot"])

    @property
    def source(self) -> str:
        """Return the source from which the router meant to reuse tokens."""
        return self.headers["x-kvferry-source"]


def _text(part: Json) -> str:
    if "content" in part and isinstance(part["content"], str):
        return part["content"]
    said = []
    for choice in part.get("choices", []):
        message = choice.get("message") or choice.get("delta") or choice
        said.append(message.get("content") or message.get("text") or "")
    return "".join(said)


async def read_answer(response: aiohttp.ClientResponse) -> Answer:
    """Read a response to its end."""
    body = await response.read()
    events: list[Json] = []
    whole: Json = {}
    if response.content_type == "text/event-stream":
        lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
        events = [json.loads(line) for line in lines if line != b"[DONE]"]
    elif response.content_type == "application/json":
        parsed = json.loads(body)
        whole = parsed if isinstance(parsed, dict) else {}
    return Answer(response.status, response.headers, body, whole, events)


@dataclass
class RunningRouter:
    """A running router and a client for it."""

    url: str
    router: Router
    session: aiohttp.ClientSession

    async def post(self, path: str, body: object, **options: Any) -> Answer:
        """POST JSON."""
        async with self.session.post(self.url + path, json=body, **options) as response:
            return await read_answer(response)

    async def get(self, path: str, **options: Any) -> Answer:
        """GET a path."""
        async with self.session.get(self.url + path, **options) as response:
            return await read_answer(response)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection for raw bytes."""
        return await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))

    async def chat(self, messages: Sequence[Json], **fields: Any) -> Answer:
        """POST /v1/chat/completions; greedy and 8 tokens unless `fields` say otherwise."""
        body = {"messages": list(messages), "max_tokens": 8, "temperature": 0} | fields
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """POST /completion; greedy and 8 tokens unless `fields` say otherwise."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        body = {"prompt": given, "n_predict": 8, "temperature": 0} | fields
        return await self.post("/completion", body)

    async def reload(self) -> Answer:
        """POST /kvferry/reload."""
        return await self.post("/kvferry/reload", {})

    async def operate(self, backend: str, action: str) -> Answer:
        """POST /kvferry/backends/{backend}/drain or undrain."""
        return await self.post(f"/kvferry/backends/{backend}/{action}", {})

    async def until_is(self, backend: str, *states: str) -> Json:
        """Wait until a backend is in one of `states`; "gone" if there is none of that name."""

        def found(state: Json) -> bool:
            is_ = [one["state"] for one in state["backends"] if one["name"] == backend]
            return (is_ or ["gone"])[0] in states

        return await self.until(found)

    async def state(self) -> Json:
        """GET /kvferry/state."""
        return (await self.get("/kvferry/state")).json

    async def metrics(self) -> dict[str, float]:
        """GET /metrics: `name{label="value"}` to value."""
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def until(
        self, predicate: Callable[[Json], bool], patience_s: float = PATIENCE_S
    ) -> Json:
        """Return the first state() for which `predicate` holds. Fail with the last one seen."""
        state: Json = {}
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    state = await self.state()
                    if predicate(state):
                        return state
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"never so: {json.dumps(state, indent=1)}") from None

    async def until_quiet(self) -> Json:
        """Wait until no slot is held and no request waits."""
        return await self.until(is_quiet)

    async def until_up(self, *names: str) -> None:
        """Wait until these backends are in use; all of them if none is named."""
        standings: Mapping[str, str] = {}
        try:
            async with asyncio.timeout(UP_PATIENCE_S):
                while True:
                    standings = await self.standings()
                    if all(standings[name] == Standing.UP for name in names or standings):
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"never up: {standings}") from None

    async def standings(self) -> Mapping[str, str]:
        """Return each backend's standing, from the router object: the API may not show it."""
        directory = self.router.selection
        return {name: directory.standing(name) for name in directory.monitors}


def is_quiet(state: Json) -> bool:
    """Return whether no slot is held, no request waits and no snapshot is in use; for `until`."""
    return (
        not state["queue"]
        and not state["waiting_for_backend"]
        and all(slot["phase"] in ("idle", "lost") for slot in state["slots"])
        and all(slot["request"] is None for slot in state["slots"])
        and all(item["in_use"] == 0 for item in state["snapshots"]["items"])
    )


def configuration(
    backends: Sequence[tuple[str, str]], kv_dir: Path | Mapping[str, Path] | None, *, yaml: str = ""
) -> Config:
    """Return DEFAULTS with `yaml` laid over them, for these backends."""
    return parse(configuration_text(backends, kv_dir, yaml=yaml), "test")


def configuration_text(
    backends: Sequence[tuple[str, str]], kv_dir: Path | Mapping[str, Path] | None, *, yaml: str = ""
) -> str:
    """Return the same as text of a file. Without `backends`, those in `yaml` are used."""
    entries: list[Json] = []
    for name, url in backends:
        place = kv_dir.get(name) if isinstance(kv_dir, Mapping) else kv_dir
        entries.append({"name": name, "url": url} | ({"kv_dir": str(place)} if place else {}))
    document = _over(pyyaml.safe_load(DEFAULTS), pyyaml.safe_load(yaml) or {})
    return pyyaml.safe_dump(document | ({"backends": entries} if entries else {}))


def _over(below: Json, above: Json) -> Json:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged


@asynccontextmanager
async def running(
    backends: Sequence[tuple[str, str]],
    kv_dir: Path | Mapping[str, Path] | None,
    *,
    yaml: str = "",
    wait_for: Sequence[str] | None = None,
    no_backend_s: float | None = None,
    path: Path | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[RunningRouter]:
    """Run a router on a free port; yield once the backends in `wait_for` are up (None: all of
    them).

    `kv_dir`: one directory for all backends, or one by name. `no_backend_s`: how long a request
    waits while no backend could serve it. `path`: file from which the configuration is reloaded.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        build(configuration(backends, kv_dir, yaml=yaml), path=path, tracing=tracing) as router,
        listening(router) as url,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        if no_backend_s is not None:
            queue = router.engine._scheduler.state.queue
            queue.limits = replace(queue.limits, no_backend_s=no_backend_s)
        kvferry = RunningRouter(url, router, session)
        if wait_for is None or wait_for:
            await kvferry.until_up(*(wait_for or ()))
        yield kvferry
