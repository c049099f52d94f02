"""Prompts that never come back are not saved, and clients that come back are not touched by it."""

from pathlib import Path

import pytest

from router.core.inventory import returns
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import running


async def test_a_clock_in_front_of_each_prompt_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a home assistant; half an hour is no time here."""
    monkeypatch.setattr(returns, "_UNUSED_S", 0.0)
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=1) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
    ):
        for minute in range(40):
            assert (await kvferry.complete(f"{minute:02} o'clock. {'x' * 300}")).status == 200
            await kvferry.until_quiet()
        assert fake.counts["save", 0] <= 16, "eight in vain, and one of eight after these"
        saved = fake.counts["save", 0]
        for _ in range(3):
            for chat in "ab":
                await kvferry.complete(chat * 1500)  # another length: people who go on
                await kvferry.until_quiet()
        assert fake.counts["save", 0] >= saved + 2
