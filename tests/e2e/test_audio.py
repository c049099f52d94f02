"""Servers that accept sounds (`--mmproj`): answers equal those of the server alone.

The text before a sound and the same sound are reused; another sound of the same length never is.
"""

import base64
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp
import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, saved
from tests.support.conversations.measuring import direct
from tests.support.conversations.media import (
    ask,
    check,
    flags,
    listen,
    nothing_overestimated,
    promised,
    sighted,
)
from tests.support.conversations.prompts import Json
from tests.support.conversations.turns import SAVES_S, named
from tests.support.models.mmproj import silent_mp3, sound
from tests.support.parity.pair import Pair, client, difference
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

TRANSCRIPTIONS = "/v1/audio/transcriptions"
N_FRAMES = 25  # of a sound; each takes one position


async def test_a_sound_on_another_server_and_after_a_restart(llama_server: StartServer) -> None:
    """A state with a sound is restored whole for that sound; others reuse the text before it."""
    a, b = await sighted(llama_server, "a"), await sighted(llama_server, "b")
    alone = await sighted(llama_server, "c")
    async with direct(alone) as client, running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry:
        first = await check(kvferry, client, listen(1), model="a")
        await kvferry.until(saved(first.prompt_tokens - N_FRAMES), SAVES_S)
        elsewhere = await check(kvferry, client, listen(1), model="b")
        assert (elsewhere.source, all_but_one(elsewhere)) == ("snapshot", True)

        a.kill()
        await kvferry.until_is("a", "down")
        await a.restart()
        await kvferry.until_up()
        again = await check(kvferry, client, listen(1), model="a")
        assert (again.source, all_but_one(again)) == ("snapshot", True)
        await kvferry.until_quiet()

        await check(kvferry, client, ask("Hello!", system=2), model="a")
        other = await check(kvferry, client, listen(2), model="a")
        assert other.source == "snapshot"
        assert 300 < promised(other) <= other.cached < first.prompt_tokens - N_FRAMES
        await nothing_overestimated(kvferry)


# --- the same status and body as without the router -----------------------------------------------

B64 = base64.b64encode(sound(1)).decode()
FORMS: dict[str, Json] = {
    "plain": {},
    "mp3": {"file": silent_mp3()},
    "stream": {"stream": "true"},
    "prompt": {"prompt": "Write down:", "language": "en"},
    "a slot": {"id_slot": "1"},
    "model": {"model": "whisper-1"},
    "no file": {"file": None},
    "no sound": {"file": b"nothing at all"},
    "empty": {"file": b""},
    "srt": {"response_format": "srt"},
    "words": {"timestamp_granularities[]": "word"},
    **{
        f"{key}={value}": {key: value}
        for key, value in (
            *(("n", "2"), ("max_tokens", "x"), ("temperature", "x"), ("cache_prompt", "false")),
            *(("lora", "[]"), ("stream", "x")),
        )
    },
}


def form(given: Json) -> aiohttp.FormData:
    """Return a form: a sound with a short greedy answer, changed by `given`.

    None leaves a field out.
    """
    fields = {"file": sound(1), "max_tokens": "4", "temperature": "0"} | given
    data = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        if isinstance(value, bytes):
            data.add_field(name, value, filename="a.wav", content_type="audio/wav")
        elif value is not None:
            data.add_field(name, value)
    return data


@pytest.fixture(params=["hearing", "deaf"])
async def pair(llama_server: StartServer, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Yield a server with a projector, and one without."""
    args = flags() if request.param == "hearing" else []
    server = await llama_server("llama", extra_args=args)
    async with running([("a", server.url)], None) as kvferry, client() as session:
        yield Pair(server.url, kvferry.url, session)


Body = dict[str, Any]  # `json` or `data`, for aiohttp


async def differences(pair: Pair, path: str, bodies: Iterable[tuple[str, Body]]) -> list[str]:
    """Return the differences between direct and routed answers, by name of the body.

    A form can be sent only once, so `data` holds its fields.
    """
    found = []
    for name, body in bodies:
        made = [{k: form(v) if k == "data" else v for k, v in body.items()} for _ in range(2)]
        direct = await pair.one(pair.direct, "POST", path, **made[0])
        routed = await pair.one(pair.routed, "POST", path, **made[1])
        if told := difference(direct, routed):
            found.append(f"{name}: {told}")
    return found


async def test_each_form(pair: Pair) -> None:
    """Each form, and bodies of other types, are answered as by the server itself."""
    bodies: list[tuple[str, Body]] = [(name, {"data": given}) for name, given in FORMS.items()]
    bodies += [("JSON", {"json": {"file": B64}}), ("nothing", {})]
    assert await differences(pair, TRANSCRIPTIONS, bodies) == []
    assert await differences(pair, "/audio/transcriptions", bodies[:1]) == []


async def transcribed(base: str, session: aiohttp.ClientSession, **given: str) -> tuple[int, Json]:
    async with session.post(base + TRANSCRIPTIONS, data=form(given)) as response:
        return response.status, await response.json()


async def test_transcriptions_beside_conversations(llama_server: StartServer) -> None:
    """A transcription is server-placed: the router forgets the slot that it took, and no other."""
    server, alone = await sighted(llama_server, "a", slots=2), await sighted(llama_server, "b")
    backends = [("a", server.url)]
    async with direct(alone) as client, running(backends, None) as kvferry:
        _, said = await transcribed(alone.url, client.session)
        talks = [ask("Hello!"), ask("Hello!", system=2)]
        for messages in talks:
            await check(kvferry, client, messages)
        for _ in range(2):
            status, found = await transcribed(kvferry.url, kvferry.session)
            assert (status, found["text"]) == (200, said["text"])
            await kvferry.until_quiet()
            answers = [await check(kvferry, client, messages) for messages in talks]
            assert any(map(all_but_one, answers))
        await nothing_overestimated(kvferry)


async def test_a_transcription_goes_to_its_model(llama_server: StartServer) -> None:
    """The form's `model` selects the server. The model without audio comes first in any order."""
    deaf: LlamaServer = await named(llama_server, "llama", "a-deaf")
    hearing = await sighted(llama_server, "hearing")
    async with running([("a", deaf.url), ("b", hearing.url)], None) as kvferry:
        for _ in range(2):
            status, found = await transcribed(kvferry.url, kvferry.session, model="hearing")
            assert (status, found["type"]) == (200, "transcript.text.done")
        status, found = await transcribed(kvferry.url, kvferry.session, model="a-deaf")
        assert (status, found["error"]["type"]) == (501, "not_supported_error")
        status, found = await transcribed(kvferry.url, kvferry.session, model="nobody")
        assert (status, found["error"]["type"]) == (404, "model_not_found")
