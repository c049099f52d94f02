"""The same llama-servers under two addresses: their own, and a router's in front of all of them.

`pair.same(call)` makes one call of a client twice and compares the results. The router runs in a
thread of its own, so that a client may block.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.servers.program import free_port
from tests.support.models.tiny_models import CHAT_TEMPLATE, tiny_model
from tests.support.servers.hosts import fleet_yaml, host, until_peers
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Json, running

# Names of the servers, in these tests and in docs/clients.md. LOCKED requires a key.
MODEL, EMBEDDER, LOCKED = "my-model", "my-embedder", "my-locked-model"
KEY = "the-key-of-the-server"
KEY_VARIABLE = "KVFERRY_TEST_CLIENTS_KEY"
# Bounded in every place: a model with random weights says all that a grammar allows.
LOOK: Json = {
    "type": "object",
    "properties": {"page": {"type": "string", "enum": ["one", "two", "three"]}},
    "required": ["page"],
    "additionalProperties": False,
}
TOOL: Json = {
    "type": "function",
    "function": {"name": "look", "description": "Look at a page.", "parameters": LOOK},
}
HI: list[Json] = [{"role": "user", "content": "Why is the sky blue?"}]

# Names, times, and counts that depend on where a prompt was computed, not on the result.
_OF_THE_MOMENT = frozenset(
    {"id", "created", "created_at", "completed_at", "timings", "cached_tokens", "call_id"}
    | {"item_id", "tool_call_id", "response_id", "_request_id", "cache_read"}
)
# Headers of a hop or of the moment.
_NOT_COMPARED = {"date", "connection", "keep-alive", "transfer-encoding", "content-length"}
_PATIENCE_S = 120.0


@dataclass
class Pair:
    """Base URLs without a slash at the end."""

    routed: str
    direct: Mapping[str, str]  # by model
    # One loop for all async calls: some clients keep connections from one call to the next.
    runner: asyncio.Runner = field(default_factory=asyncio.Runner, repr=False)

    def same(self, call: Callable[[str], Any], on: str = MODEL, raises: str | None = None) -> Any:
        """Make a call with both base URLs and assert that its results are the same.

        Return the router's result as plain data, without what belongs to the moment. `raises`: the
        class of the exception that both calls must raise instead; its status, body and message are
        compared.
        """
        direct, routed = _seen(call, self.direct[on]), _seen(call, self.routed)
        if routed != _nearly(direct):
            # A slot that held the prompt and one that held nothing may disagree by a token
            # (docs/llama-server.md, "Comparing answers"). The server now holds the prompt: ask it
            # again.
            direct = _seen(call, self.direct[on])
        assert routed == _nearly(direct)
        raised = routed.get("raised") if isinstance(routed, dict) else None
        assert raised == raises, f"both raised, or did not: {routed}"
        return routed

    def same_headers(self, call: Callable[[str], Mapping[str, str]]) -> dict[str, str]:
        """Return the headers of the routed call.

        They must be those of the direct call, and the router's own on top.
        """
        direct, routed = _lower(call(self.direct[MODEL])), _lower(call(self.routed))
        ours = {name for name in routed if name.startswith("x-kvferry-")}
        assert ours >= {"x-kvferry-request-id", "x-kvferry-backend", "x-kvferry-source"}
        assert {k: v for k, v in routed.items() if k not in ours} == direct
        return routed


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    found = {name.lower(): value for name, value in headers.items()}
    return {name: value for name, value in found.items() if name not in _NOT_COMPARED}


def _seen(call: Callable[[str], Any], base: str) -> Any:
    try:
        return plain(call(base))
    except Exception as error:  # noqa: BLE001 - how a client fails is what is compared
        return {
            "raised": type(error).__name__,
            "status": getattr(error, "status_code", None),
            "body": plain(getattr(error, "body", None)),
            "message": str(error).replace(base, "BASE"),
        }


def plain(value: Any) -> Any:
    """Return a client's result as dicts, lists and numbers, without what belongs to the moment."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json", warnings=False)
    if isinstance(value, Mapping):
        kept = {key: plain(one) for key, one in value.items() if key not in _OF_THE_MOMENT}
        if kept.get("cache_read_input_tokens") is not None:  # not in Anthropic's input_tokens
            kept["input_tokens"] += kept.pop("cache_read_input_tokens")
        return kept
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def _nearly(value: Any, within: float = 0.001) -> Any:
    """Return a value that compares equal but for rounding.

    What is in a batch changes the last digits (docs/llama-server.md, "Comparing answers"). Log
    probabilities are some -6, the numbers of an embedding some 0.1.
    """
    if isinstance(value, Mapping):
        return {
            key: _nearly(one, 0.05 if "logprob" in str(key) else within)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_nearly(one, within) for one in value]
    return pytest.approx(value, abs=within) if isinstance(value, float) else value


def calling_template() -> str:
    """Return the tiny models' template, but a tool call begins with an `e`, and there is only one.

    The grammar of a required call allows any text before the mark that begins a call. Random
    weights never produce `<tool_call>`, but soon an `e`.
    """
    head, rest = CHAT_TEMPLATE.split("{%- for call in", 1)
    tail = rest.split("{%- endfor -%}", 1)[1]
    call = "{{- 'e' + message['tool_calls'][0]['function'] | tojson -}}"
    return f"{head}{{%- if message['tool_calls'] -%}}{call}{{%- endif -%}}{tail}"


async def _serve(argv: Sequence[str], home: Path, ready: "Future[_Up]") -> None:
    """Run three servers and a router until `stop` is set."""
    template = home / "template.jinja"
    template.write_text(calling_template())
    # Another seed for each: models of equal bytes share what the router knows of them.
    flags = {
        MODEL: ["--chat-template-file", str(template)],
        EMBEDDER: ["--embeddings", "--pooling", "mean"],
        LOCKED: ["--api-key", KEY],
    }
    servers = {
        name: LlamaServer(
            tiny_model("llama", seed).path,
            slots=2,
            ctx=16384,
            kv_dir=home / "kv",
            argv=argv,
            extra_args=["-a", name, *more],
            log_path=home / f"{name}.log",
        )
        for seed, (name, more) in enumerate(flags.items())
    }
    stop = asyncio.Event()
    try:
        for server in servers.values():
            await server.start()
        urls = {name: server.url for name, server in servers.items()}
        backends: list[Json] = [
            {"name": name, "url": url, "kv_dir": str(home / "kv")}
            | ({"api_key_env": KEY_VARIABLE} if name == LOCKED else {})
            for name, url in urls.items()
        ]
        async with AsyncExitStack() as stack:
            # KVFERRY_TEST_HOP: clients connect to a host without servers, which forwards.
            ports = [free_port(), free_port()] if os.environ.get("KVFERRY_TEST_HOP") else []
            own = yaml.safe_load(fleet_yaml(0, ports)) if ports else {}
            home_of_servers = running([], None, yaml=json.dumps({"backends": backends} | own))
            kvferry = await stack.enter_async_context(home_of_servers)
            if ports:
                kvferry = await stack.enter_async_context(host(1, [], fleet_yaml(1, ports)))
                await until_peers(kvferry, "h0", "h1")
            ready.set_result(_Up(Pair(kvferry.url, urls), asyncio.get_running_loop(), stop))
            await stop.wait()
    finally:
        for server in servers.values():
            await server.stop()


@dataclass
class _Up:
    pair: Pair
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event


@contextmanager
def serving(argv: Sequence[str], home: Path) -> Iterator[Pair]:
    """Run the servers and the router in a thread of their own."""
    ready: Future[_Up] = Future()

    def work() -> None:
        try:
            asyncio.run(_serve(argv, home, ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=work, name="router")
    thread.start()
    up = ready.result(_PATIENCE_S)
    try:
        with up.pair.runner:
            yield up.pair
    finally:
        up.loop.call_soon_threadsafe(up.stop.set)
        thread.join()
