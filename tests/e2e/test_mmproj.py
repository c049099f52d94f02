"""Servers with a projector for pictures (`--mmproj`): text is reused as on any server.

Pictures are answered as by the server alone, and neither text nor pictures spoil the other's slots
or files.
"""

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, saved
from tests.support.conversations.measuring import CHAT, direct, other_words
from tests.support.conversations.media import (
    SHORT,
    ask,
    check,
    check_at_once,
    expected,
    flags,
    look,
    nothing_overestimated,
    promised,
    sighted,
)
from tests.support.conversations.prompts import chat, sentences
from tests.support.conversations.turns import SAVES_S, named
from tests.support.models.mmproj import N_POSITIONS
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("slots", [1, 2])
async def test_pictures_and_text_take_turns(llama_server: StartServer, slots: int) -> None:
    """Pictures and text on the same slots get the answers of an unshared server.

    Pictures are repeated, two pictures follow the same text, and idle slots are saved in between.
    """
    server = await sighted(llama_server, "a", slots=slots)
    alone = await sighted(llama_server, "b")
    texts = [ask(sentences(20 + i, 8), system=i % 2) for i in range(3)]
    async with direct(alone) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        for again in (False, True):
            for messages in (look(1), texts[0], look(2), texts[1], look(1), texts[2]):
                answer = await check(kvferry, client, messages)
                if messages in texts:
                    assert not again or answer.cached > 0.9 * answer.prompt_tokens
                    n_saved = len(texts) if again else texts.index(messages) + 1
                    await kvferry.until(saved(int(0.9 * answer.prompt_tokens), n_saved), SAVES_S)
                await kvferry.until_quiet()
        # The conversation about a picture continues, displaced in between and not.
        messages = look(2)
        for turn in range(3):
            answer = await check(kvferry, client, messages)
            messages = [
                *messages,
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": sentences(40 + turn, 2)},
            ]
            if turn:
                await check(kvferry, client, texts[turn])
        for _ in range(2 if slots == 1 else 0):  # from the slot, or from a file
            assert all_but_one(await check(kvferry, client, look(1)))
        await nothing_overestimated(kvferry)


async def test_a_conversation_about_a_picture_keeps_its_slot(llama_server: StartServer) -> None:
    """A conversation without pictures takes the other slot.

    The router does not know what a slot holds after the first picture, but values this content.
    """
    server, alone = await sighted(llama_server, "a", slots=2), await sighted(llama_server, "b")
    seen, read = look(1), ask("Hello!", system=2)
    yaml = "store: {idle_save_after: 'off'}"
    backends = [("a", server.url)]
    async with direct(alone) as client, running(backends, server.kv_dir, yaml=yaml) as kvferry:
        for turn in range(4):
            said = []
            for slot, messages in enumerate((seen, read)):
                answer = await check(kvferry, client, messages)
                assert answer.slot == ("a", slot)
                if turn:
                    assert answer.cached > 0.8 * answer.prompt_tokens
                more = {"role": "user", "content": sentences(40 + turn, 2)}
                said.append([{"role": "assistant", "content": answer.text}, more])
            seen, read = [*seen, *said[0]], [*read, *said[1]]
        await nothing_overestimated(kvferry)


async def test_pictures_and_text_at_once(llama_server: StartServer) -> None:
    await check_at_once(
        llama_server, [look(1), ask("Hello!"), look(2), ask("Hello!", system=2)] * 3
    )


async def test_a_long_state_with_a_picture_is_restored_whole(llama_server: StartServer) -> None:
    """No prefix can be cut out of a state with a picture, and the router does not try."""
    wide = [*flags(), "-ctk", "f32", "-ctv", "f32"]  # so that a cut would pay off
    a = await named(llama_server, "llama", "a", wide)
    b = await named(llama_server, "llama", "b", wide)
    unmoved = await llama_server("llama", slots=1, extra_args=wide)
    turns = [sentences(10 + turn, 55) for turn in range(4)]
    long = [*chat(1, *turns, length=80), look(1)[-1]]
    short = chat(1, "Hello!", length=80)
    async with (
        direct(unmoved) as client,
        running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry,
    ):
        first = await kvferry.post(CHAT, {"messages": long, "max_tokens": 4, "model": "a"})
        assert first.prompt_tokens > 10_000
        await kvferry.until(saved(first.prompt_tokens - N_POSITIONS), SAVES_S)

        answer = await check(kvferry, client, short, model="b")

        assert answer.source == "snapshot"
        assert promised(answer) > 0.9 * answer.prompt_tokens
        metrics = await kvferry.metrics()
        assert metrics['kvferry_kv_failures_total{action="cut"}'] == 0
        assert metrics['kvferry_moved_bytes_total{action="restore"}'] > 10_000 * 2048
        await nothing_overestimated(kvferry)


async def test_an_abandoned_picture_does_not_spoil_the_slot(llama_server: StartServer) -> None:
    server, alone = await sighted(llama_server, "a"), await sighted(llama_server, "b")
    async with direct(alone) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        for again in range(2):
            body = {"messages": look(1), "max_tokens": 20_000, "stream": True, "ignore_eos": True}
            async with kvferry.session.post(kvferry.url + CHAT, json=body) as response:
                assert response.status == 200
                await response.content.readany()
            await kvferry.until_quiet()
            await check(kvferry, client, look(2 - again))
            await check(kvferry, client, ask("Hello!"))
        await nothing_overestimated(kvferry)


async def test_slots_that_hold_pictures_at_the_start(llama_server: StartServer) -> None:
    """The router probes around the content of used slots, saves it and reads it.

    Other chats reuse the text before a picture. The same chat reuses the picture, here and on
    another server. A server without a projector would refuse such a file (docs/llama-server.md
    section 1.6), and is given none.
    """
    a, b = await sighted(llama_server, "a", slots=2), await sighted(llama_server, "b")
    blind = await named(llama_server, "llama", "blind")
    alone = await sighted(llama_server, "d")
    async with direct(a) as before:
        for slot in (0, 1):
            body = {"messages": look(slot, system=slot), **SHORT, "id_slot": slot}
            await before.post(CHAT, body)
    backends = [("a", a.url), ("b", b.url), ("blind", blind.url)]
    async with direct(alone) as client, running(backends, a.kv_dir) as kvferry:
        for backend in (await kvferry.state())["backends"]:
            assert (backend["snapshots"], backend["problem"]) == (True, None)
        await kvferry.until(saved(300 + N_POSITIONS, count=2), SAVES_S)

        cold = await kvferry.post(CHAT, {"messages": ask("Hello!"), **SHORT, "model": "blind"})
        assert cold.status == 200
        assert cold.cached == 0
        assert (await kvferry.metrics())['kvferry_kv_failures_total{action="restore"}'] == 0
        assert other_words(cold, await expected(client, ask("Hello!"))) == ""

        whole = await check(kvferry, client, look(1), model="b")
        assert whole.source == "snapshot"
        assert promised(whole) < whole.cached == whole.prompt_tokens - 1
        for number, model in enumerate(("b", "a", "b", "a")):
            system = number % 2
            for messages in (ask("Hi.", system=system), look(5, system=system)):
                answer = await check(kvferry, client, messages, model=model)
                assert answer.cached > 300, (model, answer.source)
        await nothing_overestimated(kvferry)
