"""A purge reaches a host that was down, when it is back."""

from pathlib import Path

import pytest

from router.servers.program import free_port
from tests.e2e.test_cold_tier import KEYS
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.hosts import fleet_yaml, host
from tests.support.servers.running_router import Json, RunningRouter

pytestmark = pytest.mark.thorough

YAML = f"store: {{idle_save_after: 20ms}}\nauth:\n  keys:{KEYS}"


async def tenants_of(kvferry: RunningRouter) -> set[str]:
    found = (await kvferry.get("/kvferry/snapshots")).json["snapshots"]
    return {one["tenant"] for one in found}


async def test_a_host_that_was_down_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port() for _ in range(2)]
    sections = [fleet_yaml(at, ports, None, None) for at in range(2)]

    def of_another_user(name: str) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))

    for name in "ab":
        (tmp_path / name).mkdir(mode=0o700)
    async with (
        FakeLlama(kv_dir=tmp_path / "a", n_slots=2) as one,
        FakeLlama(kv_dir=tmp_path / "b", n_slots=2) as two,
    ):
        of_another_user("home-b")
        async with host(1, [two], sections[1], YAML) as late:
            for who in ("alice", "bob"):
                body = {"prompt": f"of {who}: " + "a long prompt. " * 100, "n_predict": 2}
                headers = {"authorization": f"Bearer kvf_{who}"}
                assert (await late.post("/completion", body, headers=headers)).status == 200
            await late.until(lambda state: state["snapshots"]["count"] == 2)
        of_another_user("home-a")
        async with host(0, [one], sections[0], YAML) as kvferry:
            wanted = {"tenant": "alice", "everywhere": True}
            told: Json = (await kvferry.post("/kvferry/snapshots/purge", wanted)).json
            assert [bool(each["problem"]) for each in told["elsewhere"]] == [True]
            of_another_user("home-b")
            async with host(1, [two], sections[1], YAML) as back:
                # As soon as it listens: what was purged is served to nobody.
                assert await tenants_of(back) == {"bob"}
