"""Background answers in slices, before servers that cannot, refuse, or end between two of them."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import generate
from tests.support.servers.running_router import Json, running

COMPLETION, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
PROMPT = [5 + n % 60 for n in range(300)]
LATER: Json = {"service_tier": "flex", "n_predict": 200}
SAYS = bytes(generate(PROMPT, 200)).decode()


def slices(fake: FakeLlama, path: str = COMPLETION) -> list[Json]:
    """Return the bodies that generate an answer, without those of probes and prefills."""
    return [body for at, body in fake.bodies if at == path and body.get("n_predict", 1) > 20]


@pytest.mark.parametrize("path", [COMPLETION, TEXT])
async def test_slices_are_one_answer(tmp_path: Path, path: str) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
    ):
        await kvferry.complete("x" * 300)
        before = fake.computed_tokens
        answer = await kvferry.post(path, {"prompt": PROMPT, **LATER})
        assert answer.status == 200, answer.body
        said = slices(fake, path)
        assert len(said) > 1
        assert sum(body["n_predict"] for body in said) == 200
        assert {body["id_slot"] for body in said} == {answer.slot[1]}
        assert answer.text == SAYS
        assert fake.computed_tokens - before < len(PROMPT) + 20
        entry, _ = (await kvferry.get("/kvferry/requests")).json["requests"]
        assert (entry["prompt_tokens"], entry["generated_tokens"]) == (300, 200)


@pytest.mark.parametrize("more", [{"service_tier": "default"}, {"stop": ["x"]}, {"seed": 4}])
async def test_other_answers_are_generated_as_one(tmp_path: Path, more: Json) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
    ):
        await kvferry.post(COMPLETION, {"prompt": PROMPT, **LATER, **more})
        assert [body["n_predict"] for body in slices(fake)] == [200]


async def test_chat_of_a_server_that_cannot_go_on_is_generated_as_one(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x" * 300}]
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
    ):
        answer = await kvferry.post(CHAT, {"messages": messages, **LATER})
        assert (answer.status, len(answer.text)) == (200, 200)
        assert [body["n_predict"] for body in slices(fake, CHAT)] == [200]


@pytest.mark.parametrize("fault", [{"encodes": True}, {"refuses": "no"}])
async def test_answer_that_cannot_be_read_is_the_servers(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
    ):
        await kvferry.complete("x" * 300)
        for name, value in fault.items():
            setattr(fake.faults, name, value)
        answer = await kvferry.post(COMPLETION, {"prompt": PROMPT, **LATER})
        if "refuses" in fault:
            assert (answer.status, "no" in answer.body.decode()) == (500, True)
        else:
            assert (answer.status, answer.text) == (200, SAYS)


async def test_answer_goes_on_after_its_server_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server computes the prompt, and only generates what is missing."""
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        running([("a", one.url), ("b", two.url)], None) as kvferry,
    ):
        completes = one._complete

        async def ends_later(request: web.Request) -> web.StreamResponse:
            one.faults.die_at_once = bool(slices(one))
            return await completes(request)

        monkeypatch.setattr(one, "_complete", ends_later)
        answer = await kvferry.post(COMPLETION, {"prompt": PROMPT, **LATER})
        assert (answer.status, answer.text, answer.slot[0]) == (200, SAYS, "b")
        assert len(slices(one)) > 1
        assert sum(body["n_predict"] for body in slices(two)) == 200 - 48
