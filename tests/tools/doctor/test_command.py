"""`kvferry doctor` on real servers: findings on good and bad fleets, and no trace left."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from router.assembly.router import build
from router.base.tokens import pack
from router.base.types import BackendId
from router.config.schema import from_flags, parse
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.tools.doctor.command import doctor
from tests.conftest import StartServer
from tests.support.models.tiny_models import N_SWA, tiny_model
from tests.support.servers.llama_server import LlamaServer

pytestmark = pytest.mark.thorough

UNUSED_URL = "http://127.0.0.1:9"
Said = Callable[[], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that returns the printed text, on one line."""
    return lambda: " ".join(capsys.readouterr().out.split())


async def test_good_fleet(llama_server: StartServer, tmp_path: Path, said: Said) -> None:
    urls = [(await llama_server()).url for _ in range(2)]

    assert await doctor(from_flags(urls, str(tmp_path / "kv"))) == 0

    text = said()
    assert "278/278 if the prompt continues, 139/139 if it diverges" in text
    assert "can use each other's KV" in text
    assert "Ready: every backend can save and restore KV." in text
    assert "warning" not in text
    assert "error" not in text
    assert list((tmp_path / "kv").iterdir()) == []


async def test_a_server_that_hides_its_slots_is_ready(
    llama_server: StartServer, tmp_path: Path, said: Said
) -> None:
    """Regression: service and reuse work there, and the doctor said *Not ready*."""
    server = await llama_server(extra_args=["--no-slots"])
    assert await doctor(from_flags([server.url], str(tmp_path / "kv"))) == 0
    assert "Ready; saving and restoring were not tried on" in said()


async def test_output_fits_and_has_no_colours(
    llama_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await llama_server()

    await doctor(from_flags([server.url, UNUSED_URL], str(tmp_path / "kv")))

    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert not any("\x1b" in line or line != line.rstrip() for line in lines)


async def test_plain_defaults(llama_server: StartServer, tmp_path: Path, said: Said) -> None:
    """The advice removes the problem, and takes no context from a slot."""
    advised: list[tuple[str, list[str]]] = [
        ("-> restart it with --cache-ram 0 ok", ["--cache-ram", "0"]),
        (
            "-> --no-kv-unified -np 4 -c 32768 gives",
            ["--cache-ram", "0", "--no-kv-unified", "-np", "4", "-c", "32768"],
        ),
    ]
    args: list[str] = []
    text = ""
    for advice, then in [*advised, ("", [])]:
        server = await llama_server(plain_defaults=True, ctx=8192, extra_args=args)
        moves_slots = not args  # nothing can be restored there
        assert await doctor(from_flags([server.url], str(tmp_path / "kv"))) == moves_slots
        text, args = said(), then
        assert "4 slots of 8,192 tokens" in text
        assert advice in text
        assert ("warning" in text) == (advice == advised[0][0])
        await server.stop()
    assert "->" not in text


async def test_without_slot_save_path(server_argv: list[str], tmp_path: Path, said: Said) -> None:
    kv_dir = tmp_path / "kv"
    kv_dir.mkdir(mode=0o700)
    async with LlamaServer(tiny_model("llama").path, slots=2, argv=server_argv) as server:
        assert await doctor(from_flags([server.url], str(kv_dir))) == 1

    text = said()
    assert f"restart it with --slot-save-path {kv_dir}" in text
    assert "no backend can restore KV" in text


async def test_wrong_kv_dir(llama_server: StartServer, tmp_path: Path, said: Said) -> None:
    server = await llama_server()
    wrong = tmp_path / "wrong"
    wrong.mkdir(mode=0o700)

    assert await doctor(from_flags([server.url], str(wrong))) == 1

    assert f"no file appeared in kv_dir {wrong}" in said()
    assert list(wrong.iterdir()) == []


async def test_without_kv_dir(llama_server: StartServer, said: Said) -> None:
    server = await llama_server()

    assert await doctor(from_flags([server.url])) == 1

    assert "the configuration has no kv_dir for this backend" in said()


async def test_one_backend_down(llama_server: StartServer, tmp_path: Path, said: Said) -> None:
    server = await llama_server()

    assert await doctor(from_flags([server.url, UNUSED_URL], str(tmp_path / "kv"))) == 1

    text = said()
    assert "no process listens on this host and port" in text
    assert "127.0.0.1-9 cannot be used" in text
    assert "278/278" in text  # the other backend was probed all the same


async def test_two_models(llama_server: StartServer, tmp_path: Path, said: Said) -> None:
    urls = [(await llama_server(kind)).url for kind in ("llama", "lfm2")]

    assert await doctor(from_flags(urls, str(tmp_path / "kv"))) == 0

    text = said()
    assert "different model files (llama.gguf, lfm2.gguf)" in text
    assert "hybrid model" in text


async def test_other_flags(llama_server: StartServer, tmp_path: Path, said: Said) -> None:
    """Each server differs from the first in one flag; three of the flags prevent an exchange."""
    differing: tuple[list[str], ...] = (
        [],
        ["-ctk", "q8_0"],
        ["-fa", "off"],
        ["--rope-freq-base", "500000"],
        ["--kv-unified"],
    )
    urls = [(await llama_server(extra_args=flags)).url for flags in differing]

    assert await doctor(from_flags(urls, str(tmp_path / "kv"))) == 0

    text = said()
    assert "K caches have different types (f16, q8_0)" in text
    assert "flash attention is on for one of them only" in text
    assert "predict different tokens" in text
    assert text.count("cannot use the KV of") == 3
    assert "states are restreamed between servers" in text


async def test_sliding_window(llama_server: StartServer, tmp_path: Path, said: Said) -> None:
    server = await llama_server("gemma3")

    assert await doctor(from_flags([server.url], str(tmp_path / "kv"))) == 0

    text = said()
    assert (
        f"sliding-window attention of {N_SWA} tokens; tokens reused after a restore: 279/279"
        in text
    )
    assert "K f16, V f16, 2 streams" in text


async def test_swa_full(llama_server: StartServer, tmp_path: Path, said: Said) -> None:
    server = await llama_server("gemma3", extra_args=["--swa-full"])

    assert await doctor(from_flags([server.url], str(tmp_path / "kv"))) == 1

    text = said()
    assert "wrong answers" in text
    assert "-> restart it without --swa-full" in text


async def test_a_server_that_moves_what_it_holds(
    llama_server: StartServer, tmp_path: Path, said: Said
) -> None:
    server = await llama_server(extra_args=["--cache-reuse", "256"])

    assert await doctor(from_flags([server.url], str(tmp_path / "kv"))) == 1

    text = said()
    assert "must not be saved" in text
    assert "-> restart it without --cache-reuse" in text


async def test_api_key(
    llama_server: StartServer, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is missing, not in the environment, wrong, and right in turn."""
    server = await llama_server(extra_args=["--api-key", "sesame"])
    kv_dir = tmp_path / "kv"
    backend = f"{{url: '{server.url}', kv_dir: '{kv_dir}', api_key_env: DOCTOR_KEY}}"
    with_key = parse(f"backends: [{backend}]", "test")

    assert await doctor(from_flags([server.url], str(kv_dir))) == 1
    assert "the server refused the API key" in said()
    assert await doctor(with_key) == 1
    assert "DOCTOR_KEY, which is not set" in said()
    monkeypatch.setenv("DOCTOR_KEY", "wrong")
    assert await doctor(with_key) == 1
    monkeypatch.setenv("DOCTOR_KEY", "sesame")
    assert await doctor(with_key) == 0
    assert "sesame" not in said()


async def test_slots_keep_what_they_hold(llama_server: StartServer, tmp_path: Path) -> None:
    """Slots keep their content with no slot empty, and where content cannot be put back."""
    server = await llama_server()
    prompts = [pack(range(10 + slot, 200 + slot)) for slot in range(2)]
    async with Connections() as connections:
        client = LlamaClient(BackendId("x"), server.url, connections, Timeouts())
        for slot, prompt in enumerate(prompts):
            await client.prefill(slot, prompt)
        for kv_dir in (tmp_path / "kv", tmp_path, None):
            await doctor(from_flags([server.url], str(kv_dir) if kv_dir else None))

            assert [status.n_tokens for status in await client.slots()] == [190, 190]
        for slot, prompt in enumerate(prompts):
            assert (await client.prefill(slot, prompt)).cached_tokens == 189


async def test_beside_a_running_router(llama_server: StartServer, tmp_path: Path) -> None:
    """The router holds the lock on the directory; files and records stay as they are."""
    server = await llama_server()
    settings = from_flags([server.url], str(tmp_path / "kv"))
    async with build(settings) as router:
        while not router.engine.infos:  # noqa: ASYNC110 - no event tells the end of its probe
            await asyncio.sleep(0.01)
        before = sorted(path.name for path in (tmp_path / "kv").iterdir())

        assert await doctor(settings) == 0

        assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == before
