"""Agent workload: many turns that each add a little to a long history, on any free slot.

A hybrid model's state cannot go back, and no history repeats a generated answer exactly. The state
that helps is the one saved just before the answer.
"""

from contextlib import nullcontext

import pytest

from tests.conftest import StartServer
from tests.support.conversations.measuring import CHAT, Measured, measured, occupied
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.conversations.turns import named
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.thorough

TURNS = 12
SYSTEM = 57  # sentences of about 35 tokens


def tool_turn(number: int) -> list[Json]:
    """Return the messages that follow a prompt: the kept answer, a tool call and its result.

    Every fourth turn has a new task instead of the call. The kept answer is not the generated one:
    agents leave out reasoning, and rewrite calls.
    """
    said = sentences(300 + number, 1)
    if number % 4 == 3:
        return [
            {"role": "assistant", "content": said},
            {"role": "user", "content": sentences(200 + number, 2)},
        ]
    call = {"name": "look", "arguments": f'{{"at": {number}}}'}
    name = f"call_{number}"
    return [
        {
            "role": "assistant",
            "content": said,
            "tool_calls": [{"id": name, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": name, "content": sentences(100 + number, 3)},
    ]


async def strangers(kvferry: RunningRouter, number: int) -> None:
    """Send unrelated short prompts of another client, one to each slot."""
    for place, pin in enumerate(({"model": "a", "id_slot": 0}, {"model": "a", "id_slot": 1}, {})):
        body: Json = {"prompt": ids(1000 + 10 * number + place, 300), "n_predict": 4}
        await measured(kvferry, "/completion", {"model": "b"} | body | pin)


async def test_twelve_turns_of_an_agent(llama_server: StartServer) -> None:
    """In turns 2 to 12, nine prompt tokens of ten are reused.

    In one turn of three, a second client occupies the slot of the last turn. In another turn of
    three, a second client uses all slots first.
    """
    a = await named(llama_server, "lfm2", "a", slots=2)
    b = await named(llama_server, "lfm2", "b")
    messages = chat(1, sentences(2, 3), length=SYSTEM)
    turns: list[Measured] = []
    async with running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry:
        for number in range(TURNS):
            taken = number > 0 and number % 3 == 1
            if number % 3 == 2:
                await strangers(kvferry, number)
            last = turns[-1].answer.slot if turns else ("", 0)
            body: Json = {"messages": messages, "max_tokens": 16, "temperature": 0}
            async with occupied(kvferry, last) if taken else nullcontext():
                turns.append(await measured(kvferry, CHAT, body))
            assert not taken or turns[-1].answer.slot != last
            messages = [*messages, *tool_turn(number)]

    assert turns[0].answer.prompt_tokens > 2000
    assert len({turn.answer.slot for turn in turns}) > 1
    later = [(turn.reused, turn.answer.prompt_tokens) for turn in turns[1:]]
    assert sum(reused for reused, _ in later) >= 0.9 * sum(total for _, total in later), later
    # No turn is computed from the start, even right after another client used every slot.
    # On a busy machine a boundary save may not pay off; one turn then computes two turns' tokens.
    assert min(reused / total for reused, total in later) >= 0.8, later
