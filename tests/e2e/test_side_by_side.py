"""Different clients on real servers: long prompts beside short ones, titles beside conversations.

The tests verify the order of answers, and the number of tokens that are computed again.
"""

import asyncio

import pytest

from tests.conftest import StartServer
from tests.support.conversations.measuring import CHAT, Measured, measured
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.conversations.turns import named
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

_LONG = 2_000  # tokens
_LANES = 12  # requests of the client with long prompts at any time, on four slots
_SHORTS = 6
_HOMES = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
_TITLE = "Write a title of at most five words for this conversation. Answer with the title only."
_TURN = 110  # tokens of one turn, which may not be worth another file of 1,700
_FEW = 8  # tokens of a prompt's end that may be computed once more


async def test_long_prompts_of_one_client_do_not_starve_another(llama_server: StartServer) -> None:
    """A short request waits for a free slot, not for the eight queued prompts of another client."""
    a = await llama_server("llama", slots=2, ctx=2 * 4096)
    b = await llama_server("llama", slots=2, ctx=2 * 4096)
    ended: list[str] = []  # clients, in order
    over = False

    async def ask(kvferry: RunningRouter, client: str, prompt: list[int]) -> None:
        headers = {"Authorization": f"Bearer {client}"}
        body: Json = {"prompt": prompt, "n_predict": 8}
        answer = await kvferry.post("/completion", body, headers=headers)
        assert answer.status == 200, answer.body
        ended.append(client)

    async def lane(kvferry: RunningRouter, number: int) -> None:
        turn = 0
        while not over:
            await ask(kvferry, "long", ids(1_000 * number + turn, _LONG))
            turn += 1

    passed: list[int] = []  # long ones that ended before each short one
    async with (
        running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry,
        asyncio.TaskGroup() as group,
    ):
        for number in range(_LANES):
            group.create_task(lane(kvferry, number))
        for number in range(_SHORTS):
            await kvferry.until(lambda state: len(state["queue"]) >= _LANES - len(_HOMES))
            before = len(ended)
            await ask(kvferry, "short", ids(-1 - number, 20))
            passed.append(ended[before:].index("short"))
        over = True

    # In order of arrival eight would end before each; four run when a short one arrives.
    assert sum(passed) <= len(_HOMES) * _SHORTS, passed
    # The long prompts do not starve either: the queued ones were admitted.
    assert ended.count("long") >= _LANES


class Talk:
    """A conversation, and its client's requests for titles."""

    def __init__(self, kvferry: RunningRouter, number: int) -> None:
        self.kvferry, self.number, self.turns, self.known = kvferry, number, 0, 0
        self.messages = chat(number, length=45)  # some 1,600 tokens

    def ask(self) -> Json:
        """Return the next question, in the first turn pinned to the conversation's slot."""
        question = sentences(100 * self.number + self.turns, 2)
        self.messages.append({"role": "user", "content": question})
        backend, index = _HOMES[self.number]
        pin = {} if self.turns else {"model": backend, "id_slot": index}
        self.turns += 1
        return {"messages": self.messages, "max_tokens": 8, "temperature": 0} | pin

    def hear(self, answer: Answer) -> int:
        """Append the answer; return how many tokens of its prompt were never computed before."""
        self.messages = [*self.messages, {"role": "assistant", "content": answer.text}]
        fresh = answer.prompt_tokens - self.known
        self.known = answer.prompt_tokens
        return fresh

    def title(self) -> Json:
        """Return a request for a title of the last question."""
        said = [message for message in self.messages if message["role"] == "user"][-1]
        return {"messages": [{"role": "system", "content": _TITLE}, said], "max_tokens": 8}


async def _asked(kvferry: RunningRouter, body: Json) -> Answer:
    answer = await kvferry.post(CHAT, body)
    assert answer.status == 200, answer.body
    return answer


async def test_titles_are_kept_off_the_slots_of_conversations(llama_server: StartServer) -> None:
    """Titles take the slot that three conversations leave free; nothing can be saved.

    Each turn continues in its own slot, whether or not a title is generated meanwhile.
    """
    a = await named(llama_server, "llama", "a", slots=2)
    b = await named(llama_server, "llama", "b", slots=2)
    async with running([("a", a.url), ("b", b.url)], None) as kvferry:
        talks = [Talk(kvferry, number) for number in range(3)]
        for talk in talks:
            talk.hear(await _asked(kvferry, talk.ask()))
        for _ in range(3):
            for number, talk in enumerate(talks):
                bodies = talks[number - 1].title(), talk.ask()
                beside, turn = await asyncio.gather(*(_asked(kvferry, body) for body in bodies))
                talk.hear(turn)
                alone = await _asked(kvferry, talk.title())
                assert (turn.source, turn.slot) == ("resident", _HOMES[number])
                assert {beside.slot, alone.slot} == {_HOMES[3]}


async def test_what_a_title_displaces_is_not_computed_again(llama_server: StartServer) -> None:
    """A title has to displace one of four conversations on four slots.

    The conversation comes back from a file, or from the slot next to its own.
    """
    a = await named(llama_server, "llama", "a", slots=2)
    b = await named(llama_server, "llama", "b", slots=2)
    async with running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry:
        talks = [Talk(kvferry, number) for number in range(4)]
        for talk in talks:
            talk.hear(await _asked(kvferry, talk.ask()))
        turns: list[Measured] = []
        for _ in range(3):
            for number, talk in enumerate(talks):
                await measured(kvferry, CHAT, talks[number - 1].title())
                turn = await measured(kvferry, CHAT, talk.ask())
                assert turn.computed <= talk.hear(turn.answer) + _TURN + _FEW, turn
                turns.append(turn)
    assert any(turn.restored_bytes for turn in turns), "nothing was displaced"


async def test_a_message_in_preparation_does_not_shut_its_server(llama_server: StartServer) -> None:
    """A long `/v1/messages` request, which cannot be pinned, does not block its server.

    Short requests and a short message come later, and are answered by the same server before the
    long one.
    """
    a = await llama_server("llama", slots=4, ctx=4 * 12_000)
    ended: list[str] = []  # in order
    pieces = "policy: {prefill_chunk: 10ms}"  # 16 prefill chunks
    async with running([("a", a.url)], a.kv_dir, yaml=pieces) as kvferry:
        for seed in range(4):  # so that the slots' content is known
            await kvferry.complete(ids(seed, 600), id_slot=seed)

        async def message(name: str, text: str) -> None:
            said = [{"role": "user", "content": text}]
            answer = await kvferry.post("/v1/messages", {"messages": said, "max_tokens": 4})
            assert answer.status == 200, answer.body
            ended.append(name)

        async def short(name: str, seed: int) -> None:
            await kvferry.complete(ids(seed, 60), n_predict=1)
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(message("long", sentences(5, 230)))  # some 8,000 tokens
            await kvferry.until(
                lambda state: any(slot["pending_tokens"] > 7_000 for slot in state["slots"])
            )
            for number in range(2):
                await short(f"short {number}", 30 + number)
            await message("message", "hello there, my friend")

    assert ended == ["short 0", "short 1", "message", "long"]
