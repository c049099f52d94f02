"""Reload: settings in force at once, settings that need a restart; bad files change nothing."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

from router.assembly import backends
from router.config.schema import LogLevel
from router.telemetry.logs import set_level, set_up_logging
from router.tools.doctor.check import check_text
from tests.config.test_auth import auth
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import generate
from tests.support.servers.running_router import (
    Answer,
    Json,
    RunningRouter,
    configuration_text,
    running,
)

PROMPT = "p" * 300
OTHER = "q" * 300
RESTORED = len(PROMPT) - 1
UNCHANGED: Json = {"changed": [], "needs_restart": []}


@pytest.fixture
async def a(tmp_path: Path) -> AsyncIterator[FakeLlama]:
    async with FakeLlama(kv_dir=tmp_path / "kv", n_slots=1) as server:
        yield server
        assert server.violations == []


@pytest.fixture
async def b(tmp_path: Path) -> AsyncIterator[FakeLlama]:
    async with FakeLlama(kv_dir=tmp_path / "kv", n_slots=1) as server:
        yield server
        assert server.violations == []


class Setting:
    """A router with its configuration file; the first backend is `a`."""

    def __init__(self, tmp_path: Path, kvferry: RunningRouter, a: FakeLlama) -> None:
        self.path, self.kv_dir = tmp_path / "kvferry.yaml", tmp_path / "kv"
        self.kvferry = kvferry
        self.a = a

    async def reload(
        self, yaml: str = "", backends: Sequence[tuple[str, FakeLlama]] | None = None
    ) -> Answer:
        servers = [("a", self.a)] if backends is None else backends
        urls = [(name, server.url) for name, server in servers]
        self.path.write_text(configuration_text(urls, self.kv_dir, yaml=yaml))
        return await self.kvferry.reload()


@pytest.fixture
async def setting(tmp_path: Path, a: FakeLlama) -> AsyncIterator[Setting]:
    path = tmp_path / "kvferry.yaml"
    async with running([("a", a.url)], tmp_path / "kv", path=path) as kvferry:
        yield Setting(tmp_path, kvferry, a)


def assert_good(answer: Answer, prompt: str = PROMPT) -> None:
    said = bytes(generate(list(prompt.encode()), 8)).decode()
    assert (answer.status, answer.text) == (200, said)


async def test_nothing_changed(setting: Setting) -> None:
    answer = await setting.reload()

    assert answer.status == 200
    empty: Json = {"added": [], "removed": [], "changed": []}
    assert answer.json == UNCHANGED | {"backends": empty}


async def test_without_a_file(a: FakeLlama) -> None:
    async with running([("a", a.url)], None) as kvferry:
        answer = await kvferry.reload()

    assert answer.status == 409
    assert "--config" in answer.json["error"]["message"]


async def test_a_file_with_mistakes_changes_nothing(setting: Setting) -> None:
    """Reports all mistakes, as `kvferry check` prints them."""
    before = setting.kvferry.router.config
    setting.path.write_text(
        "backends:\n  - url: nonsense\nqueue: {max_requests: 1}\npolicy: best\n"
    )
    answer = await setting.kvferry.reload()
    error = answer.json["error"]

    assert (answer.status, error["type"]) == (422, "invalid_config_error")
    assert [(p["key"], p["line"]) for p in error["problems"]] == [
        ("backends[0].url", 2),
        ("policy.name", 4),
    ]
    assert error["message"] == check_text(setting.path)[1]
    assert setting.kvferry.router.config is before
    assert setting.kvferry.router.engine._scheduler.state.queue.limits.max_requests == 1024
    assert_good(await setting.kvferry.complete(PROMPT))


async def test_a_file_that_does_not_answer_blocks_nothing(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO that nobody writes, as a mount that hangs. The next reload is as any."""
    monkeypatch.setattr(backends, "_READ_S", 0.05)
    setting.path.unlink(missing_ok=True)
    os.mkfifo(setting.path)
    answer = await setting.kvferry.reload()
    assert answer.status == 422
    assert f"{setting.path} did not answer" in answer.json["error"]["message"]

    setting.path.rename(setting.path.with_name("aside"))
    answer = await setting.reload("queue: {max_requests: 7}")
    assert [change["key"] for change in answer.json["changed"]] == ["queue.max_requests"]


@pytest.mark.parametrize("what", ["no file", "kv_dir", "key"])
async def test_what_cannot_be_used_changes_nothing(setting: Setting, what: str) -> None:
    backends: list[Json] = [{"url": setting.a.url, "name": "a", "kv_dir": str(setting.kv_dir)}]
    more: Json = {"url": "http://127.0.0.1:9", "name": "b"}
    if what == "kv_dir":
        (setting.kv_dir.parent / "file").write_text("")
        more["kv_dir"] = str(setting.kv_dir.parent / "file" / "kv")
    if what == "key":
        more["api_key_env"] = "KVFERRY_NO_SUCH_KEY"
    yaml = f"queue: {{max_requests: 7}}\nbackends: {[*backends, more]}"
    if what != "no file":
        setting.path.write_text(configuration_text([], None, yaml=yaml))
    answer = await setting.kvferry.reload()

    assert answer.status == 422
    assert (str(more.get("kv_dir") or more.get("api_key_env") or setting.path)) in (
        answer.json["error"]["message"]
    )
    state = await setting.kvferry.state()
    assert [backend["name"] for backend in state["backends"]] == ["a"]
    assert setting.kvferry.router.config.queue.max_requests == 1024
    assert setting.kvferry.router.engine._scheduler.state.queue.limits.max_requests == 1024


async def test_limits_are_in_force_at_once(setting: Setting) -> None:
    kvferry = setting.kvferry
    answer = await setting.reload("queue: {max_requests: 0}\nlimits: {max_body: 1kB}")

    assert answer.json["changed"] == [
        {"key": "queue.max_requests", "from": 1024, "to": 0},
        {"key": "limits.max_body", "from": "64MiB", "to": "1kB"},
    ]
    assert (await kvferry.complete("x" * 1000)).status == 413
    setting.a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(kvferry.complete(PROMPT))
        await setting.a.until(lambda: setting.a.slots[0].busy)
        assert (await kvferry.complete(OTHER)).status == 503
        setting.a.decode_gate.set()
    assert (await setting.reload("queue: {max_requests: 0}")).json["changed"] != []


async def test_keys_are_told_by_name(setting: Setting) -> None:
    """Regression: keys were shown as `(Key(name='ada', ...),)`."""
    key = "auth: {{keys: [{{name: ada, hash: 'sha256:{}'}}]}}"

    def change(answer: Answer) -> object:
        return {one["key"]: (one["from"], one["to"]) for one in answer.json["changed"]}

    first = await setting.reload(key.format("a" * 64))
    assert change(first) == {"auth.keys": ("none", "ada")}
    second = await setting.reload(key.format("b" * 64))
    assert change(second) == {"auth.keys": ("ada", "ada (other contents)")}


async def test_times_are_in_force_for_backends_that_are_up(setting: Setting) -> None:
    """Hung actions end at the new timeout; the next request does not wait for them."""
    await setting.reload("limits: {action_timeout: 200ms}")
    assert_good(await setting.kvferry.complete(PROMPT))
    await setting.kvferry.until(lambda state: state["snapshots"]["count"] == 1)
    await setting.kvferry.until_quiet()
    assert_good(await setting.kvferry.complete(OTHER), OTHER)
    setting.a.faults.hang_actions = True

    assert_good(await setting.kvferry.complete(PROMPT))
    setting.a.faults.hang_actions = False
    await setting.kvferry.until_quiet()


async def test_a_smaller_store_gives_snapshots_up(setting: Setting) -> None:
    for prompt in (PROMPT, OTHER):
        assert_good(await setting.kvferry.complete(prompt), prompt)
        await setting.kvferry.until(lambda state: state["snapshots"]["count"] > 0)
    await setting.kvferry.until(lambda state: state["snapshots"]["count"] == 2)
    await setting.kvferry.until_quiet()
    await setting.reload("store: {max_tokens: 400}")

    assert (await setting.kvferry.state())["snapshots"]["count"] == 1
    await setting.kvferry.until(lambda _: len(list(setting.kv_dir.glob("kvf-*.kv"))) == 1)


async def test_what_does_not_fit_what_stays_changes_nothing(tmp_path: Path, a: FakeLlama) -> None:
    """Valid file, but the policy in force cannot keep its tenants apart."""
    path = tmp_path / "kvferry.yaml"
    before = "policy: passthrough"
    async with running([("a", a.url)], tmp_path / "kv", yaml=before, path=path) as kvferry:
        config = kvferry.router.config
        kept = auth(("laptop", "kvf_good", "alice"))
        answer = await Setting(tmp_path, kvferry, a).reload(kept)
        assert kvferry.router.config == config

    (problem,) = answer.json["error"]["problems"]
    assert (answer.status, problem["key"]) == (422, "policy.name")
    assert "passthrough cannot keep tenants apart" in problem["message"]
    assert "needs a restart: policy.name" in problem["message"]


@pytest.mark.parametrize(
    ("yaml", "keys"),
    [
        ("listen: 127.0.0.1:1", ["listen"]),
        ("tokenizer: {mode: 'off', cache: 1MiB}", ["tokenizer.mode", "tokenizer.cache"]),
        ("logging: {format: json}", ["logging.format"]),
        ("policy: sticky", ["policy.name"]),
        ("store: {max_bytes: 0}", ["store.max_bytes"]),
        ("admin: {token_env: HOME}", ["admin.token_env"]),
    ],
)
async def test_what_needs_a_restart_is_named_and_left(
    setting: Setting, yaml: str, keys: list[str]
) -> None:
    """Named at each reload, because the value is not in force."""
    before = setting.kvferry.router.config
    for _ in range(2):
        answer = await setting.reload(yaml)
        assert answer.status == 200
        assert [change["key"] for change in answer.json["needs_restart"]] == keys
        assert answer.json["changed"] == []
    assert setting.kvferry.router.config == before
    assert (await setting.kvferry.state())["policy"] == "prefer_idle_slot_with_global_restore"


async def test_a_part_of_a_section(setting: Setting) -> None:
    answer = await setting.reload("store: {fsync: true, min_tokens: 5, max_bytes: 1GiB}")

    assert [change["key"] for change in answer.json["needs_restart"]] == ["store.fsync"]
    store = setting.kvferry.router.config.store
    assert (store.fsync, store.min_tokens, store.max_bytes) == (False, 5, 1024**3)


# -- backends --------------------------------------------------------------------------------------


async def test_a_new_directory_is_opened_and_what_is_in_it_offered(
    setting: Setting, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    async with FakeLlama(kv_dir=elsewhere, n_slots=1) as c:
        async with running([("c", c.url)], elsewhere) as before:
            assert_good(await before.complete(PROMPT))
            await before.until(lambda state: state["snapshots"]["count"] == 1)
        setting.kv_dir = elsewhere
        c.slots[0].tokens = []
        await setting.reload(backends=[("c", c)])
        state = await setting.kvferry.until_is("c", "up")
        assert state["snapshots"]["count"] == 1
        await setting.kvferry.until_is("a", "gone")
        answer = await setting.kvferry.complete(PROMPT)

        assert (answer.slot[0], answer.source, answer.cached) == ("c", "snapshot", RESTORED)


async def test_what_a_removed_backend_held_is_restored_on_another(
    b: FakeLlama, setting: Setting
) -> None:
    """Removed backends finish their streams first; nothing was saved before."""
    yaml = "store: {idle_save_after: 'off'}"
    kvferry = setting.kvferry
    await setting.reload(yaml)
    setting.a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(PROMPT, stream=True))
        await setting.a.until(lambda: setting.a.slots[0].busy)
        answer = await setting.reload(yaml, [("b", b)])
        assert answer.json["backends"] == {"added": ["b"], "removed": ["a"], "changed": []}
        await kvferry.until_is("b", "up")
        await kvferry.until_is("a", "draining")
        setting.a.decode_gate.set()
    assert_good(task.result())
    state = await kvferry.until_is("a", "gone")
    again = await kvferry.complete(PROMPT)

    assert [slot["backend"] for slot in state["slots"]] == ["b"]
    assert (again.slot[0], again.source, again.cached) == ("b", "snapshot", RESTORED)
    shown = [name for name in await kvferry.metrics() if 'backend="b"' in name]
    gauges = ("kvferry_backend_up", "kvferry_slots")
    assert [name for name in shown if name.startswith(gauges)]
    gone = [name.replace('"b"', '"a"') for name in shown if name.startswith(gauges)]
    assert not set(gone) & set(await kvferry.metrics())


async def test_prompts_are_read_without_the_first_of_a_model(
    b: FakeLlama, setting: Setting
) -> None:
    """Shared by both backends, the tokenizer had belonged to the removed one."""
    await setting.reload(backends=[("a", setting.a), ("b", b)])
    await setting.kvferry.until_is("b", "up")
    await setting.reload(backends=[("b", b)])
    await setting.kvferry.until_is("a", "gone")
    await setting.a.go_down()
    answer = await setting.kvferry.complete(OTHER)

    assert_good(answer, OTHER)
    assert (answer.slot[0], answer.source) == ("b", "cold")  # and not "none"
    await setting.a.come_up()


async def test_nor_is_one_missed_that_nobody_knows_to_be_gone(
    tmp_path: Path, a: FakeLlama, b: FakeLlama
) -> None:
    path, yaml = tmp_path / "kvferry.yaml", "health: {interval: 60s}"
    async with running([("a", a.url)], tmp_path / "kv", yaml=yaml, path=path) as kvferry:
        await Setting(tmp_path, kvferry, a).reload(yaml, [("a", a), ("b", b)])
        await kvferry.until_is("b", "up")
        await a.go_down()
        answer = await kvferry.complete(OTHER)

        assert_good(answer, OTHER)
        assert (answer.slot[0], answer.source) == ("b", "cold")
        await a.come_up()


async def test_another_url_under_the_same_name(b: FakeLlama, setting: Setting) -> None:
    assert_good(await setting.kvferry.complete(PROMPT))
    answer = await setting.reload(backends=[("a", b)])
    assert answer.json["backends"] == {"added": [], "removed": [], "changed": ["a"]}
    await setting.kvferry.until(
        lambda state: [(x["url"], x["state"]) for x in state["backends"]] == [(b.url, "up")]
    )
    again = await setting.kvferry.complete(PROMPT)

    assert_good(again)
    assert (again.source, again.cached) == ("snapshot", RESTORED)


async def test_another_name_for_the_same_server(setting: Setting) -> None:
    """Never both names at once: they would use the same slots."""
    kvferry = setting.kvferry
    setting.a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(PROMPT, stream=True))
        await setting.a.until(lambda: setting.a.slots[0].busy)
        await setting.reload(backends=[("new", setting.a)])
        state = await kvferry.until_is("a", "draining")
        assert [backend["name"] for backend in state["backends"]] == ["a"]
        setting.a.decode_gate.set()
    assert_good(task.result())
    await kvferry.until_is("new", "up")

    answer = await kvferry.complete(PROMPT)
    assert (answer.slot[0], answer.cached) == ("new", RESTORED)


async def test_wanted_again_before_it_is_gone(b: FakeLlama, setting: Setting) -> None:
    kvferry = setting.kvferry
    setting.a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(PROMPT, stream=True))
        await setting.a.until(lambda: setting.a.slots[0].busy)
        await setting.reload(backends=[("b", b)])
        await kvferry.until_is("a", "draining")
        assert (await kvferry.operate("a", "undrain")).status == 409
        await setting.reload(backends=[("a", setting.a), ("b", b)])
        await kvferry.until_is("a", "up")
        setting.a.decode_gate.set()
    assert_good(task.result())
    assert {backend["name"] for backend in (await kvferry.state())["backends"]} == {"a", "b"}


async def test_drained_backend_is_removed_or_stays_drained(b: FakeLlama, setting: Setting) -> None:
    kvferry = setting.kvferry
    await kvferry.operate("a", "drain")
    await kvferry.until_is("a", "drained")
    await setting.reload("queue: {max_requests: 5}", [("a", setting.a), ("b", b)])
    await kvferry.until_is("b", "up")
    await kvferry.until_is("a", "drained")
    await setting.reload(backends=[("b", b)])
    await kvferry.until_is("a", "gone")


async def test_log_level(setting: Setting, capsysbinary: Any) -> None:
    """Applies to loggers that have been used already, too."""
    before = structlog.get_config()
    try:
        set_up_logging(setting.kvferry.router.config.logging)
        # Loggers of other modules must not keep this test's standard error.
        structlog.configure(cache_logger_on_first_use=False)
        log = structlog.get_logger("test").bind()
        log.info("first")
        log.debug("not yet")
        set_level(LogLevel.WARNING)
        log.info("no more")
        log.error("second")
        set_level(LogLevel.DEBUG)
        log.debug("third")
        lines = capsysbinary.readouterr().err.splitlines()
        assert [b"first" in lines[0], b"second" in lines[1], b"third" in lines[2]] == [True] * 3
        assert len(lines) == 3
        await setting.reload("logging: {level: error}")
        log.warning("no")
        assert b'"no"' not in capsysbinary.readouterr().err
    finally:
        structlog.configure(**before)
