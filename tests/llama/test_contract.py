"""The fields and behaviour of llama-server that kvferry relies on, for the fake and a real one.

If a new llama-server fails here, kvferry needs a change. If the fake fails here, the other tests
prove nothing.
"""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.models.tiny_models import tiny_model
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.llama_server import LlamaServer

PROMPT = list(b"The quick brown fox jumps over the lazy dog and runs away from it.")
MESSAGES = [{"role": "user", "content": "hi"}]
Json = dict[str, Any]


@dataclass
class Server:
    """One of the two servers, seen from outside only."""

    url: str
    kv_dir: Path
    session: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200
            return await response.json()

    async def post(self, path: str, body: Json, status: int = 200) -> Json:
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == status, await response.text()
            answer: Json = await response.json()
            return answer

    async def stream(self, path: str, body: Json) -> tuple[list[Json], bool]:
        """Return the events, and whether [DONE] came after them."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        done = data[-1] == "[DONE]"
        return [json.loads(line) for line in (data[:-1] if done else data)], done

    async def complete(self, slot: int, prompt: list[int], n: int = 4) -> Json:
        body = {"prompt": prompt, "n_predict": n, "id_slot": slot, "temperature": 0}
        return await self.post("/completion", body | {"return_tokens": True})

    async def action(self, slot: int, action: str, name: str = "a", status: int = 200) -> Json:
        return await self.post(f"/slots/{slot}?action={action}", {"filename": name}, status)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.real)])
def argv(request: pytest.FixtureRequest) -> list[str] | None:
    """Return the command of a real server; None: the fake one.

    Looked for only here, so that the fake half runs without a llama-server; not on the event loop,
    where blocking calls fail.
    """
    return request.getfixturevalue("server_argv") if request.param == "real" else None


@pytest.fixture
async def server(argv: list[str] | None, tmp_path: Path) -> AsyncIterator[Server]:
    kv_dir = tmp_path / "kv"
    kv_dir.mkdir(mode=0o700)
    # No connection is reused: llama-server closes it after a stream without announcing it.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        if argv is None:
            async with FakeLlama(kv_dir=kv_dir, n_slots=2, n_ctx=2048) as fake:
                yield Server(fake.url, kv_dir, session)
                assert fake.violations == []
        else:
            path = tiny_model("llama").path
            async with LlamaServer(path, slots=2, ctx=4096, kv_dir=kv_dir, argv=argv) as real:
                yield Server(real.url, kv_dir, session)


async def test_what_the_probe_reads(server: Server) -> None:
    props = await server.get("/props")
    model = (await server.get("/v1/models"))["data"][0]

    assert (await server.get("/health")) == {"status": "ok"}
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert isinstance(props["model_path"], str)
    assert isinstance(props["chat_template"], str)
    assert isinstance(props["build_info"], str)
    assert props["media_marker"]
    assert props["is_sleeping"] is False
    assert props["modalities"]["vision"] is False
    assert isinstance(model["id"], str)
    assert {"n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size"} <= set(model["meta"])


async def test_slots_before_and_after_use(server: Server) -> None:
    """A slot that never ran has no token count (section 5.1)."""
    before = await server.get("/slots")
    await server.complete(1, PROMPT, n=4)
    after = await server.get("/slots")

    assert [(s["id"], s["n_ctx"], s["is_processing"]) for s in before] == [
        (0, 2048, False),
        (1, 2048, False),
    ]
    assert "n_prompt_tokens" not in after[0]
    assert after[1]["n_prompt_tokens"] == len(PROMPT) + 3
    assert isinstance(after[1]["id_task"], int)


async def test_native_completion(server: Server) -> None:
    """A cold run reports its counts; the same prompt again costs one token (section 1.3)."""
    cold = await server.complete(1, PROMPT)
    warm = await server.complete(1, PROMPT)

    assert (cold["id_slot"], cold["stop"], cold["stop_type"]) == (1, True, "limit")
    assert len(cold["tokens"]) == cold["tokens_predicted"] == 4
    assert cold["tokens_evaluated"] == len(PROMPT)
    assert cold["tokens_cached"] == len(PROMPT) + 3
    assert (cold["timings"]["cache_n"], cold["timings"]["prompt_n"]) == (0, len(PROMPT))
    assert (warm["timings"]["cache_n"], warm["timings"]["prompt_n"]) == (len(PROMPT) - 1, 1)
    assert cold["tokens"] == warm["tokens"]
    assert all(cold["timings"][key] >= 0 for key in ("prompt_ms", "predicted_ms"))
    assert cold["timings"]["predicted_n"] == 4


async def test_n_predict_zero_prefills(server: Server) -> None:
    """`n_predict: 0` samples one token nevertheless, which does not get into the KV."""
    answer = await server.complete(0, PROMPT, n=0)
    saved = await server.action(0, "save")

    assert answer["tokens_predicted"] == 1
    assert answer["tokens_cached"] == saved["n_saved"] == len(PROMPT)


async def test_without_return_tokens_there_are_none(server: Server) -> None:
    body = {"prompt": PROMPT, "n_predict": 2, "id_slot": 0}
    assert (await server.post("/completion", body))["tokens"] == []


async def test_native_stream(server: Server) -> None:
    """Partial events carry slot -1 and their tokens, the last event the totals; no [DONE]."""
    body = {"prompt": PROMPT, "n_predict": 3, "id_slot": 1}
    events, done = await server.stream("/completion", body)

    assert not done
    assert [event["stop"] for event in events] == [False, False, False, True]
    assert [len(event["tokens"]) for event in events] == [1, 1, 1, 0]
    assert {event["id_slot"] for event in events[:-1]} == {-1}
    assert events[-1]["id_slot"] == 1
    assert events[-1]["tokens_cached"] == len(PROMPT) + 2
    assert events[-1]["timings"]["prompt_n"] == len(PROMPT)


async def test_progress_comes_first(server: Server) -> None:
    """The first event's `cache` is the earliest report of reuse; its token 0 means nothing."""
    await server.complete(0, PROMPT)
    body = {"prompt": [*PROMPT, 33, 34], "n_predict": 2, "id_slot": 0, "return_progress": True}
    events, _ = await server.stream("/completion", body)

    progress = events[0]["prompt_progress"]
    assert progress["total"] == len(PROMPT) + 2
    assert progress["cache"] == progress["processed"] == len(PROMPT)
    assert events[0]["tokens"] == [0]


async def test_openai_completion(server: Server) -> None:
    body = {"prompt": "hello there", "max_tokens": 3}
    answer = await server.post("/v1/completions", body)
    events, done = await server.stream("/v1/completions", body)

    usage = answer["usage"]
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert usage["completion_tokens"] == 3
    assert usage["prompt_tokens_details"]["cached_tokens"] == answer["timings"]["cache_n"]
    assert done
    assert len(events) == 4
    assert "usage" not in events[0]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert "cache_n" in events[-1]["timings"]


async def test_chat(server: Server) -> None:
    answer = await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3})

    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == answer["timings"]["prompt_n"]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_stream(server: Server, include_usage: bool) -> None:
    """The role comes first, `timings` last, `usage` only on request, without choices."""
    body: Json = {"messages": MESSAGES, "max_tokens": 3}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    events, done = await server.stream("/v1/chat/completions", body)

    assert done
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    deltas = [event["choices"][0]["delta"] for event in events[1:4]]
    assert all(list(delta) == ["content"] for delta in deltas)
    assert events[4]["choices"][0] == {"finish_reason": "length", "index": 0, "delta": {}}
    assert len(events) == 5 + include_usage
    assert "timings" in events[-1]
    assert ("usage" in events[-1]) == include_usage
    assert (events[-1]["choices"] == []) == include_usage


async def test_chat_is_template_then_tokenize(server: Server) -> None:
    """The exact prompt ids of a chat request are known before it is sent (section 6)."""
    prompt = (await server.post("/apply-template", {"messages": MESSAGES}))["prompt"]
    body = {"content": prompt, "add_special": True, "parse_special": True}
    ids = (await server.post("/tokenize", body))["tokens"]
    chat = {"messages": MESSAGES, "max_tokens": 1, "id_slot": 0}
    await server.post("/v1/chat/completions", chat)
    await server.action(0, "save")

    assert ids == head_tokens((server.kv_dir / "a").read_bytes())
    assert (await server.post("/detokenize", {"tokens": ids[-3:]}))["content"] in prompt


async def test_save_and_restore(server: Server) -> None:
    """A saved slot continues in another slot: tokens and bytes as reported, prefix cached."""
    done = await server.complete(0, PROMPT)
    saved = await server.action(0, "save")
    restored = await server.action(1, "restore")
    follow = [*PROMPT, *done["tokens"], 33]
    moved = await server.complete(1, follow)
    stayed = await server.complete(0, follow)

    path = server.kv_dir / "a"
    n_tokens = len(PROMPT) + 3  # the last sampled token is not in the KV
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "a", n_tokens)
    assert saved["n_written"] == path.stat().st_size == restored["n_read"]
    assert (restored["id_slot"], restored["n_restored"]) == (1, n_tokens)
    assert saved["timings"]["save_ms"] >= 0
    assert restored["timings"]["restore_ms"] >= 0
    assert head_tokens(path.read_bytes()) == PROMPT + done["tokens"][:3]
    assert moved["timings"]["cache_n"] == stayed["timings"]["cache_n"] == n_tokens
    assert moved["tokens"] == stayed["tokens"]


def head_tokens(data: bytes) -> list[int]:
    """Return the tokens in the head of a state file (section 1.4)."""
    magic, version, n_words, marker, layout, n = struct.unpack_from("<3IiII", data)
    assert (magic, version, n_words, marker, layout) == (0x67677371, 4, n + 4, -1, 1)
    return list(struct.unpack_from(f"<{n}i", data, 24))


async def test_empty_slot_is_a_file_of_40_bytes(server: Server) -> None:
    saved = await server.action(0, "save")
    restored = await server.action(1, "restore")

    assert (saved["n_saved"], saved["n_written"]) == (0, 40)
    assert restored["n_restored"] == 0


async def test_erase(server: Server) -> None:
    await server.complete(0, PROMPT, n=1)

    assert await server.action(0, "erase") == {"id_slot": 0, "n_erased": len(PROMPT)}
    assert (await server.complete(0, PROMPT))["timings"]["cache_n"] == 0


async def test_failed_restore_empties_the_slot(server: Server) -> None:
    """A restore of a missing file empties the slot too (section 0.5)."""
    await server.complete(0, PROMPT)
    error = await server.action(0, "restore", "missing", status=400)

    assert error["error"]["type"] == "invalid_request_error"
    assert (await server.get("/slots"))[0]["n_prompt_tokens"] == 0


async def test_damaged_file_is_refused(server: Server) -> None:
    """A wrong magic number is a clean 400. (A truncated file may be much worse: section 0.3.)"""
    await server.complete(0, PROMPT)
    await server.action(0, "save")
    path = server.kv_dir / "a"
    path.write_bytes(b"\0\0\0\0" + path.read_bytes()[4:])

    await server.action(1, "restore", status=400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/slots/0?action=fly", {}),
        ("/slots/x?action=erase", {}),
        ("/slots/0?action=save", {}),
        ("/slots/0?action=save", {"filename": "a/b"}),
        ("/slots/0?action=save", {"filename": ".."}),
        ("/completion", {}),
        ("/completion", {"prompt": [99999]}),
        ("/v1/chat/completions", {}),
    ],
)
async def test_bad_requests(server: Server, path: str, body: Json) -> None:
    error = (await server.post(path, body, status=400))["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")


async def test_slot_numbers_wrap(server: Server) -> None:
    """Slot 7 of 2 is slot 1, and the answer repeats the 7 (section 1.1): never send such a slot."""
    await server.complete(1, PROMPT, n=1)
    assert await server.action(7, "erase") == {"id_slot": 7, "n_erased": len(PROMPT)}


async def test_prompt_too_long(server: Server) -> None:
    body = {"prompt": [65] * 3000, "n_predict": 1, "stream": True}
    error = (await server.post("/completion", body, status=400))["error"]

    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (3000, 2048)


async def test_unpinned_request_goes_where_its_prefix_is(server: Server) -> None:
    """The most similar slot comes first, then the last never-used slot (section 2.2)."""
    first = await server.complete(-1, PROMPT)
    again = await server.complete(-1, [*PROMPT, 33])
    other = await server.complete(-1, list(range(80, 120)))

    assert [first["id_slot"], again["id_slot"], other["id_slot"]] == [1, 1, 0]


async def raw_post(url: str, bodies: list[Json]) -> bytes:
    """Post `bodies` to /completion on one connection in order; return all received bytes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    with contextlib.suppress(ConnectionError):
        for i, body in enumerate(bodies):
            data = json.dumps(body).encode()
            close = "Connection: close\r\n" if i == len(bodies) - 1 else ""
            head = f"POST /completion HTTP/1.1\r\nHost: {host}\r\n{close}"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            if body.get("stream") and not close:
                received += await reader.readuntil(b"\r\n0\r\n\r\n")
        received += await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return received


async def test_connection_ends_after_a_stream(server: Server) -> None:
    """No header announces the end ("Connections"): a second request there gets no answer."""
    body: Json = {"prompt": PROMPT, "n_predict": 1}
    plain = await raw_post(server.url, [body, body])
    streamed = await raw_post(server.url, [body | {"stream": True}, body])

    assert plain.count(b"HTTP/1.1 200") == 2
    assert streamed.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" not in streamed.lower()


async def test_likeliest_tokens(server: Server) -> None:
    """Backends are told apart by their likeliest tokens."""
    body = {"prompt": PROMPT, "n_predict": 1, "n_probs": 5, "temperature": 0}
    answer = await server.post("/completion", body)

    (first,) = answer["completion_probabilities"]
    assert len(first["top_logprobs"]) == 5
    for entry in first["top_logprobs"]:
        assert isinstance(entry["id"], int)
        assert isinstance(entry["logprob"], float)


async def test_messages_drop_the_slot(server: Server) -> None:
    """/v1/messages ignores `id_slot` (section 2.1); `usage` counts new and cached separately."""
    body = {"messages": MESSAGES, "max_tokens": 2, "id_slot": 1}
    cold, warm = [await server.post("/v1/messages", body) for _ in range(2)]

    usage = cold["usage"]
    assert usage["output_tokens"] == 2
    assert usage["cache_read_input_tokens"] == 0
    assert warm["usage"]["cache_read_input_tokens"] == usage["input_tokens"] - 1
    assert warm["content"][0]["type"] == "text"
    # Both requests ran on one slot, which the server chose, not on the requested one.
    slots = await server.get("/slots")
    assert ["id_task" in slot for slot in slots].count(True) == 1
