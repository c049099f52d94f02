"""Servers on demand, with real processes: swaps lose no conversation, and no process is left."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import yaml as pyyaml
from msgspec.structs import replace

from router.assembly.backends import StartError
from router.base.types import BackendId
from router.core.model import servers as servers_module
from router.core.model.tuning import TUNING
from router.llama.attach.monitor import Monitor
from router.llama.attach.probe import Probe
from router.llama.attach.probe_result import ProbeResult
from router.servers.program import family, free_port
from tests.support.conversations.prompts import Json, ids
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.running_router import PATIENCE_S, Answer, RunningRouter, running

pytestmark = [pytest.mark.real, pytest.mark.thorough]

T = TypeVar("T")
N = 3000
SLEEPS = [sys.executable, "-c", "import time; print('${port}'); time.sleep(600)"]


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def _quick_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(TUNING, server_backoff_first_s=0.05, server_failures=3)
    monkeypatch.setattr(servers_module, "TUNING", quick)


def model(name: str, kind: str = "llama", **more: Any) -> Json:
    """Return a model of the `servers` section, tiny and of a memory kind."""
    entry = {"name": name, "model": str(tiny_model(kind).path), "slots": 2, "ctx": 8192}
    return entry | {"args": ["-t", "1"]} | more


def config(models: Sequence[Json], **more: Any) -> str:
    return pyyaml.safe_dump({"servers": {"models": list(models)} | more})


async def servers(kvferry: RunningRouter) -> dict[str, Json]:
    listed = (await kvferry.get("/kvferry/servers")).json["servers"]
    return {one["name"]: one for one in listed}


async def until_phase(kvferry: RunningRouter, name: str, *phases: str) -> Json:
    async def found() -> Json | None:
        server = (await servers(kvferry))[name]
        return server if server["phase"] in phases else None

    return await until(found)


async def until_gone(pids: Sequence[int]) -> None:
    """Wait until none of these processes is left."""

    async def gone() -> bool:
        return not any(is_there(pid) for pid in pids)

    await until(gone)


async def until(found: Callable[[], Awaitable[T | None]]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if what := await found():
                return what
            await asyncio.sleep(0.02)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def ask(kvferry: RunningRouter, name: str, prompt: Sequence[int], **more: Any) -> Answer:
    answer = await kvferry.complete(prompt, model=name, **more)
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.parametrize("kinds", [("llama", "lfm2"), ("gemma3", "mamba")])
async def test_conversations_survive_each_swap(kinds: tuple[str, str]) -> None:
    """Two models of which one is loaded at a time, a conversation with each, in turn."""
    models = [model(kind, kind) for kind in kinds]
    prompts = {kind: ids(1, N) for kind in kinds}
    async with running([], None, yaml=config(models, loaded=1), wait_for=()) as kvferry:
        for turn in range(3):
            for kind in kinds:
                answer = await ask(kvferry, kind, prompts[kind], n_predict=4, return_tokens=True)
                assert answer.headers["x-kvferry-backend"] == kind
                if turn:
                    assert answer.cached >= 0.99 * len(prompts[kind]), (kind, turn, answer.timings)
                prompts[kind] += answer.json["tokens"] + ids(100 + turn, 8)
        listed = (await kvferry.get("/kvferry/servers")).json
    assert listed["swaps"] == 5


@pytest.fixture
def _never_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every probe give way to a request, but one before a server ends."""
    monkeypatch.setattr(Monitor, "_makes_way", lambda monitor: monitor._gives_way)


@pytest.mark.usefixtures("_never_probed")
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("kinds", [("llama", "lfm2"), ("gemma3", "mamba")], ids="-".join)
async def test_swap_before_any_probe_loses_nothing(kinds: tuple[str, str], slots: int) -> None:
    """A slow machine with requests all the time has no moment for a probe."""
    models = [model(kind, kind, slots=slots) for kind in kinds]
    prompts = {kind: ids(1, N) for kind in kinds}
    async with running([], None, yaml=config(models, loaded=1), wait_for=()) as kvferry:
        for turn in range(3):
            for kind in kinds:
                answer = await ask(kvferry, kind, prompts[kind], n_predict=4, return_tokens=True)
                if turn:
                    assert answer.cached >= 0.99 * len(prompts[kind]), (kind, turn, answer.timings)
                prompts[kind] += answer.json["tokens"] + ids(100 + turn, 8)


@pytest.mark.usefixtures("_never_probed")
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
async def test_first_two_chats_compute_their_system_prompt_once(kind: str) -> None:
    system = {"role": "system", "content": "You know all about boats. " * 100}
    async with running([], None, yaml=config([model("a", kind)]), wait_for=()) as kvferry:
        first, second = [
            await kvferry.chat([system, {"role": "user", "content": question}], model="a")
            for question in ("What is a keel?", "Who sails?")
        ]

    assert first.prompt_tokens > 500
    assert second.cached > 0.9 * first.prompt_tokens, second.timings


@pytest.mark.usefixtures("_never_probed")
async def test_stop_before_any_probe_loses_nothing(tmp_path: Path) -> None:
    """The next run finds the state, and the proof that a state can be restored."""
    prompt = ids(1, N)
    yaml = config([model("a", slots=1)], kv_dir=str(tmp_path / "kv"))
    async with running([], None, yaml=yaml, wait_for=()) as kvferry:
        await ask(kvferry, "a", prompt)
        await kvferry.router.stop()

    async with running([], None, yaml=yaml, wait_for=()) as kvferry:
        again = await ask(kvferry, "a", prompt)

    assert again.cached == N - 1, again.timings


async def test_nothing_is_loaded_and_requests_are_taken() -> None:
    async with running([], None, yaml=config([model("a"), model("b")]), wait_for=()) as kvferry:
        health = await kvferry.get("/kvferry/health")
        assert (health.status, health.json["servers"]) == (200, {"a": "stopped", "b": "stopped"})
        unknown = await kvferry.complete(ids(1, 20), model="c")
        assert unknown.status == 404
        assert "available models: a, b" in unknown.json["error"]["message"]
        models = (await kvferry.get("/v1/models")).json["data"]
        assert [(m["id"], m["status"]["value"]) for m in models] == [
            ("a", "unloaded"),
            ("b", "unloaded"),
        ]
        assert {one["phase"] for one in (await servers(kvferry)).values()} == {"stopped"}
        await ask(kvferry, "b", ids(1, 20))
        models = (await kvferry.get("/v1/models")).json["data"]
        assert {m["id"]: m["status"]["value"] for m in models} == {"a": "unloaded", "b": "loaded"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 3}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 3}),
        ("/tokenize", {"content": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
async def test_each_route_starts_the_server(path: str, body: Json) -> None:
    extra = ["--embeddings", "--pooling", "mean"] if "embeddings" in path else []
    models = [model("a"), model("b", args=["-t", "1", *extra])]
    async with running([], None, yaml=config(models, loaded=1), wait_for=()) as kvferry:
        answer = await kvferry.post(path, body | {"model": "b"})
        assert answer.status in ((200, 501) if path == "/infill" else (200,)), answer.body
        assert {n: s["phase"] for n, s in (await servers(kvferry)).items()} == {
            "a": "stopped",
            "b": "up",
        }


async def test_with_one_model_any_name_will_do() -> None:
    async with running([], None, yaml=config([model("a")]), wait_for=()) as kvferry:
        assert (await kvferry.complete(ids(1, 20), model="gpt-4o")).status == 200
        assert (await kvferry.complete(ids(1, 20))).status == 200


async def test_command_follows_a_log(tmp_path: Path) -> None:
    """New lines come as the server writes them, each once."""
    async with running([], None, yaml=config([model("a")]), wait_for=()) as kvferry:
        await kvferry.complete(ids(1, 20), model="a")
        program = "import sys; from router.tools.cli import main; sys.exit(main())"
        command = ("servers", "log", "a", "-f", "--bytes", "200", "--url", kvferry.url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, *command),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        try:
            assert await process.stdout.readline()
            (path,) = (tmp_path / "state").rglob("a.log")
            with path.open("ab") as file:
                file.write(b"a line of the test\n")
            lines = [b""]
            async with asyncio.timeout(30):
                while lines[-1] != b"a line of the test\n":
                    lines.append(await process.stdout.readline())
            assert lines.count(lines[-1]) == 1
        finally:
            process.kill()
            await process.wait()


async def test_an_operator_starts_stops_and_reads_the_log() -> None:
    async with running([], None, yaml=config([model("a")]), wait_for=()) as kvferry:
        assert (await kvferry.post("/kvferry/servers/a/start", {})).json["phase"] == "starting"
        found = await until_phase(kvferry, "a", "up")
        for action in ("drain", "undrain"):
            conflict = await kvferry.operate("a", action)
            assert conflict.status == 409
            assert "kvferry servers" in conflict.json["error"]["message"]
        pids = family(found["pid"])
        text = (await kvferry.get("/kvferry/servers/a/log")).body.decode()
        for asked in ("0", "x", "9" * 5000):
            assert (await kvferry.get(f"/kvferry/servers/a/log?bytes={asked}")).status == 400
        assert text
        assert (await kvferry.post("/kvferry/servers/a/restart", {})).status == 200
        await until_gone(pids)
        pids = family((await until_phase(kvferry, "a", "up"))["pid"])
        await kvferry.post("/kvferry/servers/a/stop", {})
        await until_phase(kvferry, "a", "stopped")
        await until_gone(pids)
        assert (await kvferry.operate("a", "drain")).status == 404
        for path, told in (("x/start", "no server 'x'"), ("a/jump", "start, stop or restart")):
            refused = await kvferry.post(f"/kvferry/servers/{path}", {})
            assert refused.status == 404
            assert told in refused.json["error"]["message"]


async def test_idle_for_its_ttl_it_is_stopped_and_loses_nothing() -> None:
    prompt = ids(1, N)
    async with running([], None, yaml=config([model("a", ttl="300ms")]), wait_for=()) as kvferry:
        await ask(kvferry, "a", prompt)
        await until_phase(kvferry, "a", "stopped")
        again = await ask(kvferry, "a", prompt + ids(2, 5))
    assert again.cached >= N - 1


@pytest.mark.usefixtures("_quick_to_fail")
async def test_a_server_that_is_killed_while_it_answers() -> None:
    """The request may be what ended it: that does not count against the server."""
    models = [model("a"), model("b")]
    async with running([], None, yaml=config(models), wait_for=()) as kvferry:
        await ask(kvferry, "a", ids(1, 50))
        await ask(kvferry, "b", ids(1, 50))
        guard = (await servers(kvferry))["a"]["pid"]
        body = {"prompt": ids(2, 50), "model": "a", "n_predict": -1, "stream": True}
        body |= {"ignore_eos": True}
        async with kvferry.session.post(kvferry.url + "/completion", json=body) as stream:
            await stream.content.readany()
            _, server, *_ = family(guard)
            os.kill(server, signal.SIGKILL)
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
        await ask(kvferry, "b", ids(3, 50))
        await ask(kvferry, "a", ids(4, 50))
        found = (await servers(kvferry))["a"]
        assert (found["phase"], found["failures"]) == ("up", 0)
        assert "it was ended by SIGKILL" in found["problem"]
        await until_gone([guard, server])


@pytest.mark.usefixtures("_quick_to_fail")
async def test_a_server_that_is_killed_while_it_loads(tmp_path: Path) -> None:
    """The first start is killed; the request waits for the next one."""
    gate = tmp_path / "gate"
    wait = f"while not __import__('os').path.exists({str(gate)!r}): __import__('time').sleep(0.02)"
    python = [sys.executable, "-c", f"{wait}\nimport sys; from router.servers.prebuilt import main"]
    python[-1] += "; sys.exit(main(sys.argv[1:]))"
    flags = ["-m", str(tiny_model("llama").path), "--port", "${port}", "-np", "1", "-c", "2048"]
    entry = {"name": "a", "command": [*python, *flags, "--cache-ram", "0"]}
    async with running([], None, yaml=config([entry]), wait_for=()) as kvferry:
        async with asyncio.TaskGroup() as group:
            request = group.create_task(kvferry.complete(ids(1, 20), model="a"))

            async def server() -> int | None:
                found = (await servers(kvferry))["a"]["pid"]
                return next(iter(family(found)[1:]), None) if found else None

            os.kill(await until(server), signal.SIGKILL)
            gate.touch()
        assert request.result().status == 200
        assert (await servers(kvferry))["a"]["failures"] == 1


@pytest.mark.usefixtures("_quick_to_fail")
@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"name": "x", "model": __file__}, "it ended with code 1"),
        ({"name": "x", "command": ["/no/such", "${port}"]}, "it ended with code 1"),
        (
            {"name": "x", "command": SLEEPS, "start_timeout": "200ms"},
            "it was not ready, and wrote nothing for 0.2 s; look at `start_timeout`",
        ),
    ],
    ids=["no GGUF", "no program", "never ready"],
)
async def test_a_server_that_cannot_start(entry: Json, reason: str) -> None:
    await _is_refused(entry, reason)


async def test_one_failure_is_none_to_a_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is tried again for requests, and these wait for it."""
    slow = replace(TUNING, server_backoff_first_s=600.0, server_backoff_most_s=600.0)
    monkeypatch.setattr(servers_module, "TUNING", slow)
    entry = {"name": "x", "model": "/no/such.gguf", "preload": True}
    async with running([], None, yaml=config([entry]), wait_for=()) as kvferry:
        await until_phase(kvferry, "x", "failed")
        assert (await kvferry.get("/kvferry/health")).status == 200


@pytest.mark.usefixtures("_quick_to_fail")
async def test_a_model_that_does_not_fit_into_memory() -> None:
    """Its KV takes 40 GB, and the process may have 4."""
    limited = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", sys.executable]
    flags = ["-m", str(tiny_model("llama").path), "-np", "1", "-c", "40000000"]
    command = [*limited, "-m", "router.servers.prebuilt", "--port", "${port}", *flags]
    await _is_refused({"name": "x", "command": command}, "it ended with code 1")


async def _is_refused(entry: Json, reason: str) -> None:
    """Ask the model x: a clear error, another model goes on, and no process is left."""
    async with running([], None, yaml=config([entry, model("a")]), wait_for=()) as kvferry:
        refused = await kvferry.complete(ids(1, 20), model="x")
        assert refused.status == 503
        assert refused.json["error"]["message"].startswith("the llama-server for the model 'x'")
        assert float(refused.headers["Retry-After"]) > 1
        await ask(kvferry, "a", ids(1, 20))
        found = await servers(kvferry)
        assert found["x"]["phase"] == "failed"
        assert found["x"]["problem"].startswith(reason), found["x"]["problem"]
        assert found["x"]["pid"] is None
        assert (await kvferry.get("/kvferry/health")).status == 200


async def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    async def drop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    other = await asyncio.start_server(drop, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]

    def choose() -> int:
        taken.append(port if not taken else free_port())
        return taken[-1]

    monkeypatch.setattr("router.servers.supervisor.free_port", choose)
    async with other, running([], None, yaml=config([model("a")]), wait_for=()) as kvferry:
        await ask(kvferry, "a", ids(1, 20))
        assert (await servers(kvferry))["a"]["failures"] == 0
    assert len(taken) == 2


async def test_a_preloaded_server_is_there_before_the_first_request() -> None:
    models = [model("a"), model("b", preload=True)]
    async with running([], None, yaml=config(models, loaded=1), wait_for=()) as kvferry:
        await until_phase(kvferry, "b", "up")
        await ask(kvferry, "a", ids(1, 20))
        assert (await servers(kvferry))["b"]["phase"] == "stopped"


async def test_equal_process_is_not_probed_another_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced by one of the same shape with other weights: its KV is not reused."""
    probed: list[str] = []

    class Counted(Probe):
        async def run(self, *more: Any) -> ProbeResult:
            found = await super().run(*more)
            probed.append(self._client.id)
            return found

    monkeypatch.setattr("router.llama.attach.monitor.Probe", Counted)
    path, prompt = tmp_path / "model.gguf", ids(1, N)
    shutil.copy(tiny_model("llama").path, path)
    yaml = config([model("a") | {"model": str(path)}])
    async with running([], None, yaml=yaml, wait_for=()) as f:
        await ask(f, "a", prompt)
        for seed, cached in ((0, N - 1), (1, 0)):
            await f.post("/kvferry/servers/a/stop", {})
            await until_phase(f, "a", "stopped")
            if seed:
                shutil.copy(tiny_model("llama", seed=seed).path, path)
            answer = await ask(f, "a", prompt + ids(2 + seed, 5))
            assert answer.cached >= cached
            assert bool(answer.cached) == bool(cached)
        await f.post("/kvferry/servers/a/stop", {})
        await until_phase(f, "a", "stopped")
    assert probed == ["a", "a"]


@pytest.fixture
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.web.server.sink.PING_S", 0.05)


@pytest.mark.usefixtures("_early")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": ids(1, 40), "n_predict": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_a_stream_is_kept_alive_while_its_model_is_loaded(path: str, body: Json) -> None:
    """The events are those of a stream that did not wait, behind comments."""
    more: Json = {"model": "a", "stream": True, "temperature": 0, "max_tokens": 4, "seed": 1}
    async with running([], None, yaml=config([model("a")]), wait_for=()) as kvferry:
        waited = await kvferry.post(path, body | more)
        at_once = await kvferry.post(path, body | more)
    assert waited.body.startswith(b":\n\n")
    assert not at_once.body.startswith(b":")
    assert (waited.status, waited.headers["Content-Type"]) == (200, "text/event-stream")
    assert waited.headers["x-kvferry-request-id"]
    assert waited.text == at_once.text
    assert [sorted(event) for event in waited.events] == [sorted(e) for e in at_once.events]


@pytest.mark.usefixtures("_early", "_quick_to_fail")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_an_error_after_comments_is_an_event(path: str) -> None:
    """One from the router, and one from the server: a prompt that does not fit."""
    entry = {"name": "x", "command": SLEEPS, "start_timeout": "200ms"}
    models = [entry, model("a", slots=1, ctx=512)]
    async with running([], None, yaml=config(models), wait_for=()) as kvferry:
        body: Json = {"stream": True, "max_tokens": 4}
        for name, text, told in (
            ("x", "Hi", "the llama-server for the model 'x' does not start"),
            ("a", "many words " * 600, "exceeds the available context size"),
        ):
            messages = [{"role": "user", "content": text}]
            answer = await kvferry.post(path, body | {"model": name, "messages": messages})
            assert answer.status == 200
            (event,) = answer.events
            assert told in event["error"]["message"], event
            assert (b"event: error\n" in answer.body) == (path == "/v1/messages")
        await ask(kvferry, "a", ids(1, 20))


async def test_other_programs_need_the_key_of_a_server() -> None:
    async with running([], None, yaml=config([model("a")]), wait_for=()) as kvferry:
        await ask(kvferry, "a", ids(1, 20))
        (backend,) = (await kvferry.state())["backends"]
        url, body = backend["url"] + "/completion", {"prompt": ids(1, 20), "n_predict": 1}
        async with kvferry.session.post(url, json=body) as refused:
            assert refused.status == 401
        (guard,) = [one["pid"] for one in (await servers(kvferry)).values()]
        key = kvferry.router.selection.monitors[BackendId("a")].client._authorization
        assert key is not None
        for pid in family(guard):
            assert key[1].removeprefix(b"Bearer ") not in command_line(pid)


async def test_a_look_loads_nothing() -> None:
    """A load balancer asks for /health all the time."""
    async with running([], None, yaml=config([model("a")]), wait_for=()) as kvferry:
        assert (await kvferry.get("/health")).json == {"status": "ok"}
        assert (await kvferry.get("/props")).json["status"] == {"value": "unloaded"}
        assert (await servers(kvferry))["a"]["phase"] == "stopped"


async def test_a_look_at_a_model_is_answered_by_its_server() -> None:
    """llama-server's router mode goes by the query, and its web page asks so."""
    async with running([], None, yaml=config([model("a"), model("e")]), wait_for=()) as kvferry:
        await ask(kvferry, "e", ids(1, 20))
        queries = ("", "?model=e", "?model=", "?model=a", "?model=x")
        answers = [(await kvferry.get(f"/props{query}")).status for query in queries]
        assert answers == [200, 200, 200, 200, 404]  # of one that is not loaded, as configured


async def test_requests_while_a_server_dies_are_served_by_the_next() -> None:
    """The backend is down before the end of the process is known; nothing may spin or be lost."""
    async with running([], None, yaml=config([model("a")]), wait_for=()) as kvferry:
        await ask(kvferry, "a", ids(1, 20))
        guard = (await servers(kvferry))["a"]["pid"]
        os.kill(guard, signal.SIGSTOP)  # it cannot tell the end of its server
        os.kill(family(guard)[1], signal.SIGKILL)
        await kvferry.until(lambda state: not state["backends"][0]["up"])
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(kvferry.complete(ids(2, 20), model="a"))
            found = await servers(kvferry)  # the router answers
            assert found["a"]["phase"] == "up"
            os.kill(guard, signal.SIGCONT)
        assert waiting.result().status == 200


async def test_servers_at_sockets_have_no_port(tmp_path: Path) -> None:
    """They are swapped and come back at the same socket, though llama-server leaves it behind."""
    text = config([model("a"), model("b", "lfm2")], loaded=1, sockets=True)
    folder = tmp_path / "state" / "kvferry" / "run"
    async with running([], None, yaml=text, wait_for=[]) as kvferry:
        answer: Answer | None = None
        for name in ("a", "b", "a"):
            answer = await kvferry.complete(ids(1, 300), model=name)
            assert answer.status == 200, answer.body
        listed = {one["name"]: one for one in (await kvferry.state())["backends"]}
        assert listed["a"]["url"] == f"unix:{folder}/a.sock"
        assert (folder.stat().st_mode & 0o777, (folder / "a.sock").is_socket()) == (0o700, True)
    assert answer is not None
    assert answer.cached >= 290


async def test_socket_with_a_long_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("x" * 100)))
    with pytest.raises(StartError, match=r"servers.sockets: .* longer than 107 bytes"):
        async with running([], None, yaml=config([model("a")], sockets=True), wait_for=[]):
            pass
