"""Streams of the router beside those of the server, event by event, while a prompt is computed."""

import asyncio
import re
from pathlib import Path

import orjson
import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import Json, sentences
from tests.support.parity.pair import Pair, Seen, client, difference
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

EAGER = "policy: {coalesce_above: 1ms, prefill_chunk: 20ms}\nanswers: {counts: server}"
ROUTES = ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
# Small batches: the server reports after each.
BATCHES = ["-b", "64", "-ub", "64"]
PROGRESS = re.compile(rb'(?:event: [\w.]+\n)?data: [^\n]*"prompt_progress"[^\n]*\n\n')


def _body(route: str, text: str) -> Json:
    more: Json = {"stream": True, "temperature": 0, "seed": 1, "model": "m"}
    if route in ("/completion", "/v1/completions"):
        return more | {"prompt": text, "max_tokens": 4}
    if route == "/v1/responses":
        return more | {"input": text, "max_output_tokens": 4}
    return more | {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


def _without_progress(seen: Seen) -> Seen:
    return Seen(seen.status, seen.headers, PROGRESS.sub(b"", seen.body))


def _progress(seen: Seen) -> list[Json]:
    """Return the events with progress, whole."""
    events = [event.partition(b"data: ")[2] for event in PROGRESS.findall(seen.body)]
    return [orjson.loads(event) for event in events]


def _ids(seen: Seen) -> set[bytes]:
    return set(re.findall(rb'"id":"((?:chatcmpl-|resp_)\w+)"', seen.body))


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@pytest.mark.parametrize("more", [{}, {"return_progress": True, "verbose": True}])
async def test_each_route(llama_server: StartServer, kind: str, more: Json, tmp_path: Path) -> None:
    """Both servers compute each prompt from nothing; the router's in several steps."""
    a, b = await asyncio.gather(
        *(
            llama_server(kind, slots=1, ctx=8192, kv_dir=tmp_path, extra_args=BATCHES)
            for _ in range(2)
        )
    )
    async with running([("a", a.url)], tmp_path, yaml=EAGER) as kvferry, client() as session:
        pair = Pair(b.url, kvferry.url, session)
        for seed, route in enumerate(ROUTES):
            # The numbers before each prompt: it shares nothing with the one before.
            body = _body(route, f"{seed} " * 40 + sentences(seed, 60)) | more
            direct, routed = await pair.ask("POST", route, data=orjson.dumps(body))
            assert difference(_without_progress(direct), _without_progress(routed)) == "", route
            assert len(_ids(routed)) == len(_ids(direct)) <= 1, route
            theirs, ours = _progress(direct), _progress(routed)
            assert bool(theirs) == bool(ours), route
            assert {_shape(event) for event in ours} == {_shape(event) for event in theirs}, route
            if ours:
                counts = [_told(event) for event in ours]
                done = [one["processed"] for one in counts]
                assert done == sorted(done), route
                (total,) = {one["total"] for one in map(_told, theirs)}
                assert {one["total"] for one in counts} == {total} == {done[-1]}, route
                assert done[0] == counts[0]["cache"], route
                times = [one["time_ms"] for one in counts]
                assert len(done) > 2, route
                assert times[0] == 0, route
            await kvferry.until_quiet()


def _told(event: Json) -> Json:
    found: Json = event["prompt_progress"]
    return found


def _shape(value: object) -> str:
    """Return the keys of a value in their order, at every level."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shape(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_shape, value)) + "]"
    return type(value).__name__
