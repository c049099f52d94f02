"""Flags that change the layout of state files, or for which requests they are valid.

Files of different layouts are never mixed up, and no restored state changes an answer.
"""

from collections.abc import Sequence

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.measuring import direct, measured
from tests.support.conversations.prompts import ids
from tests.support.conversations.turns import (
    SAVES_S,
    Reference,
    ask_all,
    first_saved,
    first_turn,
    named,
    tiny_talk,
)
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

QUANTISED = ("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on")
TRANSPOSED = ("-fa", "off")  # V is stored by column


def _cases() -> list[object]:
    often = {("llama", QUANTISED), ("llama", TRANSPOSED), ("gemma3", QUANTISED)}
    often |= {("gemma3", TRANSPOSED), ("lfm2", TRANSPOSED)}
    return [
        pytest.param(
            *(kind, flags),
            id=f"{kind}-{name}",
            marks=[] if (kind, flags) in often else [pytest.mark.slow],
        )
        for kind in ("llama", "gemma3", "lfm2")
        for name, flags in (("q8_0", QUANTISED), ("fa-off", TRANSPOSED))
    ]


@pytest.mark.parametrize(("kind", "flags"), _cases())
async def test_on_another_server_with_other_slots(
    llama_server: StartServer, kind: str, flags: Sequence[str]
) -> None:
    """Files with quantised rows or a transposed V are restreamed, cut and padded as well."""
    home = await named(llama_server, kind, "a", flags, slots=2)
    away = await named(llama_server, kind, "b", flags)
    unmoved = await llama_server(kind, slots=1, extra_args=flags)
    talk = tiny_talk(kind)
    async with (
        direct(unmoved) as client,
        running([("a", home.url), ("b", away.url)], home.kv_dir) as kvferry,
    ):
        first = await first_turn(kvferry, talk)
        await first_saved(kvferry, talk, first)
        reference = Reference(client, f"{kind} {flags}")
        await ask_all(kvferry, reference, talk, first, {"model": "b"})


async def test_with_a_draft_model(llama_server: StartServer, server_argv: list[str]) -> None:
    """Slots are emptied before a restore: state files lack the draft model's context.

    Otherwise the next request would fail and end all others (docs/llama-server.md section 0.10).
    """
    if "router.servers.prebuilt" in server_argv:
        pytest.skip("the prebuilt server takes no draft model; KVFERRY_TEST_FLAVOUR=binary")
    plain = await llama_server("llama", slots=1)
    draft = ["-md", str(plain.model), "--spec-type", "draft-simple", "-a", "a"]
    server = await llama_server("llama", slots=1, ctx=8192, extra_args=draft)
    short, long = ids(1, 700), ids(2, 2000)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        firsts = [await kvferry.complete(prompt, n_predict=32) for prompt in (short, long)]
        assert [first.status for first in firsts] == [200, 200]
        assert any(first.timings.get("draft_n") for first in firsts), "nothing was drafted"
        await kvferry.until(saved(1500), SAVES_S)
        for _ in range(2):
            for prompt in (short, long):  # the slot always holds the other prompt
                body = {"prompt": [*prompt, *ids(3, 20)], "n_predict": 32, "temperature": 0}
                again = await measured(kvferry, "/completion", body)
                assert again.reused >= len(prompt)
                assert again.restored_bytes > 0
        assert server.pid is not None
        await kvferry.until_quiet()
