"""Servers restarted with other options, and fleets started in any order.

Requests are running and waiting meanwhile.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.servers.program import free_port
from tests.conftest import StartServer
from tests.support.conversations.conversing import kept_busy, saved
from tests.support.conversations.prompts import ids
from tests.support.faults.breaking import BROKEN_OFF, RIGHT, Reference, seen, told, until_at_work
from tests.support.faults.consistency import assert_consistent
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

Seen = Callable[[str, object], None]
LONG, PREFILL = 1000, 2500
WATCHFUL = """
health: {interval: 200ms, timeout: 500ms}
queue: {no_backend_wait: 60s}
policy: {coalesce_above: 'off'}
"""
OTHERS: dict[str, Any] = {
    "with more slots": {"slots": 4},
    "with fewer slots": {"slots": 1},
    "with a shorter context": {"ctx": 2 * 2048},
    "with other cache types": {"extra_args": ("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on")},
    "with another model": {"kind": "gemma3"},
    "with its plain defaults": {"plain_defaults": True},
}


def change(what: str) -> object:
    slow = [] if what == "with fewer slots" else [pytest.mark.slow]
    mark = pytest.mark.fault(
        f"server restarted {what}", "computing a prompt, streaming, with a queue"
    )
    return pytest.param(what, marks=[mark, *slow], id=what.replace(" ", "-"))


@pytest.mark.parametrize("what", [change(what) for what in OTHERS])
async def test_restarted_as_another(
    llama_server: StartServer, tmp_path: Path, record_property: Seen, what: str
) -> None:
    first = await llama_server(slots=2, ctx=2 * 8192)
    assert first.kv_dir is not None
    prompts = [ids(n, PREFILL) for n in (1, 2)]
    waiting = [ids(n, 200) for n in (3, 4, 5)]
    short = what == "with a shorter context"
    yaml = WATCHFUL.replace("60s", "10s") if short else WATCHFUL
    async with running([("a", first.url)], first.kv_dir, yaml=yaml) as kvferry:
        await kvferry.complete(ids(9, LONG))
        await kvferry.until(saved(LONG))
        streams = {"stream": True, "n_predict": 5000, "ignore_eos": True}
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(told(kvferry, ids(8, 50), id_slot=1, **streams))]
        await kvferry.until(lambda s: s["slots"][1]["phase"] == "running")
        await until_at_work(kvferry.session, {"a": first})
        asked += [loop.create_task(told(kvferry, prompt)) for prompt in (*prompts, *waiting)]
        await kvferry.until(lambda s: len(s["queue"]) >= 3)
        await until_at_work(kvferry.session, {"a": first}, 2)
        first.kill()
        await kvferry.until_is("a", "down")
        flags = {"slots": 2, "ctx": 2 * 8192, "port": first.port} | OTHERS[what]
        second = await llama_server(**flags)
        answers = await asyncio.gather(*asked)
        outcomes = [
            seen(answer) if answer is None or answer.status != 400 else TOO_LONG
            for answer in answers
        ]
        record_property("client", ", ".join(dict.fromkeys(outcomes)))
        assert outcomes[0] == BROKEN_OFF
        assert outcomes[1:3] == [TOO_LONG if short else RIGHT] * 2
        assert outcomes[3:] == [RIGHT] * 3
        await kvferry.until_quiet()
        same = Reference(second)
        for answer, prompt in zip(answers[1:], (*prompts, *waiting), strict=True):
            if answer is not None and answer.status == 200:
                assert await same.wrong(answer, prompt) == ""
        again = await told(kvferry, ids(9, LONG))
        assert again is not None
        assert await same.wrong(again, ids(9, LONG)) == ""
        assert (again.source == "snapshot") is (what in SAME_STATES)
        await assert_consistent(kvferry, [first.kv_dir])


TOO_LONG = "400: longer than the context"
SAME_STATES = ("with more slots", "with fewer slots", "with a shorter context")


@pytest.mark.fault("router started before its servers", "no server up, then one, then both")
async def test_start_order_does_not_matter(
    llama_server: StartServer, reference: Reference, tmp_path: Path, record_property: Seen
) -> None:
    """A request sent before any server is up is answered; the last server to start is used, too."""
    backends = [(name, f"http://127.0.0.1:{free_port()}") for name in "ab"]
    ports = [int(url.rpartition(":")[2]) for _, url in backends]
    async with running(backends, tmp_path / "kv", yaml=WATCHFUL, wait_for=[]) as kvferry:
        early = asyncio.get_running_loop().create_task(told(kvferry, ids(1, LONG)))
        await kvferry.until(lambda s: s["waiting_for_backend"] == 1)
        await llama_server(slots=1, port=ports[0])
        answer = await early
        assert answer is not None
        assert await reference.wrong(answer, ids(1, LONG)) == ""
        assert answer.slot[0] == "a"
        await kvferry.until(saved(LONG))
        await llama_server(slots=1, port=ports[1])
        await kvferry.until_up("a", "b")
        async with kept_busy(kvferry, ids(1, LONG) + ids(2, 5), ("a", 0), 2000):
            other = await told(kvferry, ids(1, LONG))
        assert other is not None
        assert (other.slot[0], other.source) == ("b", "snapshot")
        assert await reference.wrong(other, ids(1, LONG)) == ""
        record_property("client", RIGHT)
        await assert_consistent(kvferry, [tmp_path / "kv"])
