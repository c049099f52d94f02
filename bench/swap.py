"""`python -m bench.swap`: conversations with two models of which one is loaded at a time, in turn.

kvferry starts and stops the llama-servers itself. The peer is llama-server's own router mode with
`--models-max 1`, which needs a compiled llama-server (`LLAMA_SERVER_BIN`). Each request is for
the other model than the one before, so every request needs a swap.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from bench import rig
from bench.client import Client, Json
from bench.conversation import Conversation
from bench.report import Report, arguments_of, median, run_bench
from router.servers.program import find_server, free_port
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.llama_server import LlamaServer

COLUMNS = (
    *("models", "contender", "turns", "prompt tokens", "computed", "reused %", "least reused %"),
    *("first token p50 s", "max s", "of it new tokens s", "x needed"),
)
CHAT = "/v1/chat/completions"


@dataclass
class Found:
    """The turns of a contender from the second round on."""

    prompt: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    prompt_s: list[float] = field(default_factory=list)  # of `seconds`: the server's, for a prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.swap", description=__doc__)
    parser.add_argument(
        *("--model",), type=Path, action="append", help="a .gguf file, twice; default: tiny models"
    )
    parser.add_argument("--kinds", default="llama,lfm2", help="of the tiny models")
    parser.add_argument("--tokens", type=int, default=3000, help="of each conversation")
    parser.add_argument("--rounds", type=int, default=6, help="turns with each model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=2, help="of each server")
    parser.add_argument("--busy", type=int, default=0, help="loops that keep processors at work")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure each contender with servers of its own."""
    title = "Two models, one loaded at a time"
    report = Report("swap", title, list(COLUMNS), arguments_of(options))
    async with AsyncExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-"))
        home = Path(made)
        for _ in range(options.busy):
            await stack.enter_async_context(_loop())
        models = _models(options, home / "models")
        load_s, end_s = await _load_and_end_s(next(iter(models.values())), options)
        async with _kvferry(models, options, home) as ferry:
            found = await asyncio.to_thread(_turns, ferry.url, models, options)
            restore_s = await asyncio.to_thread(_restore_s, ferry.url)
        swap_s = end_s + load_s + restore_s
        _add(report, "kvferry", models, found, swap_s)
        program = find_server()
        if len(program) == 1:
            async with _router_mode(program[0], home / "models", options) as peer:
                found = await asyncio.to_thread(_turns, peer.url, models, options)
            _add(report, "llama-server, router mode", models, found, end_s + load_s)
        else:
            report.notes.append("router mode left out: set LLAMA_SERVER_BIN to a llama-server")
    report.notes.append(
        f"needed: the other server's end ({end_s:.3f} s), the load ({load_s:.2f} s; both medians of"
        f" 3, of a llama-server alone), a restore ({restore_s:.4f} s; kvferry), and the server's"
        " own time for the prompt; the first round, which is cold, does not count"
    )
    return report


@asynccontextmanager
async def _loop() -> AsyncIterator[None]:
    """Keep a processor at work, as other programs do."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def _models(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Return two models by name, as links in one folder, which router mode wants."""
    folder.mkdir()
    files = options.model or [tiny_model(kind).path for kind in options.kinds.split(",")]
    files = (files * 2)[:2]
    models = {f"m{number}": folder / f"m{number}.gguf" for number in range(2)}
    for path, file in zip(models.values(), files, strict=True):
        path.symlink_to(file.resolve())
    return models


async def _load_and_end_s(model: Path, options: argparse.Namespace) -> tuple[float, float]:
    loads, ends = [], []
    for _ in range(3):
        server = LlamaServer(model, slots=options.slots, ctx=_ctx(options), threads=options.threads)
        begun = perf_counter()
        await server.start()
        loads.append(perf_counter() - begun)
        begun = perf_counter()
        await server.stop()
        ends.append(perf_counter() - begun)
    return median(loads), median(ends)


def _ctx(options: argparse.Namespace) -> int:
    per_slot: int = options.tokens + options.rounds * 64 + 1024
    slots: int = options.slots
    return slots * per_slot


def _kvferry(
    models: dict[str, Path], options: argparse.Namespace, home: Path
) -> AbstractAsyncContextManager[rig.Proxy]:
    url = f"http://127.0.0.1:{free_port()}"
    argv = [sys.executable, "-c", "from router.tools.cli import main; main()", "serve"]
    for name, path in models.items():
        argv += ["--model", f"{name}={path}"]
    ctx = _ctx(options) // options.slots
    argv += ["--loaded", "1", "--slots", str(options.slots), "--ctx", str(ctx)]
    argv += ["--server-args", f"-t {options.threads}", "--kv-dir", str(home / "kv")]
    argv += ["--listen", url.removeprefix("http://")]
    env = os.environ | {"XDG_STATE_HOME": str(home / "state")}
    return rig.started("kvferry", argv, url, "/kvferry/health", home, env)


def _router_mode(
    program: str, folder: Path, options: argparse.Namespace
) -> AbstractAsyncContextManager[rig.Proxy]:
    port = free_port()
    argv = [program, "--models-dir", str(folder), "--models-max", "1", "--port", str(port)]
    argv += ["-np", str(options.slots), "-c", str(_ctx(options)), "-t", str(options.threads)]
    url = f"http://127.0.0.1:{port}"
    return rig.started("router-mode", argv, url, "/health", folder.parent)


def _turns(url: str, models: dict[str, Path], options: argparse.Namespace) -> Found:
    """Send the turns; the answer has one token, so its time is that of the first token."""
    client, found = Client(url), Found()
    chats = {name: Conversation(number) for number, name in enumerate(models)}
    for turn in range(options.rounds):
        for name, chat in chats.items():
            if not turn:
                sample = _Counting(client, name)
                chat.grow_to(sample, options.tokens)  # type: ignore[arg-type]
            chat.ask()
            body: Json = {"model": name, "messages": chat.messages, "max_tokens": 1}
            begun = perf_counter()
            answer = client.post(CHAT, body | {"temperature": 0}).json()
            if turn:
                found.seconds.append(perf_counter() - begun)
                found.prompt.append(answer["usage"]["prompt_tokens"])
                found.computed.append(answer["timings"]["prompt_n"])
                found.prompt_s.append(answer["timings"]["prompt_ms"] / 1000)
            chat.heard(answer["choices"][0]["message"]["content"] or "Yes.")
    client.close()
    return found


@dataclass
class _Counting:
    """A client that names a model in each call: router mode wants one."""

    client: Client
    model: str

    def post(self, path: str, value: Json) -> object:
        return self.client.post(path, value | {"model": self.model})


def _restore_s(url: str) -> float:
    with closing(Client(url)) as client:
        lines = client.get("/metrics").body.decode().splitlines()
    found = dict(
        line.rsplit(" ", 1) for line in lines if line.startswith("kvferry_restore_seconds")
    )
    n = float(found["kvferry_restore_seconds_count"])
    return float(found["kvferry_restore_seconds_sum"]) / max(n, 1.0)


def _add(report: Report, name: str, models: dict[str, Path], found: Found, swap_s: float) -> None:
    reused = [100 * (1 - n / of) for n, of in zip(found.computed, found.prompt, strict=True)]
    prompt, computed = sum(found.prompt), sum(found.computed)
    first_s, prompt_s = median(found.seconds), median(found.prompt_s)
    report.add(
        *(len(models), name, len(found.seconds), prompt, computed),
        *(100 * (1 - computed / prompt), min(reused)),
        *(first_s, max(found.seconds), prompt_s, first_s / (swap_s + prompt_s)),
    )


if __name__ == "__main__":
    sys.exit(main())
