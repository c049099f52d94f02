"""The routers that are compared, each started in front of llama-servers of its own."""

import argparse
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from bench import rig
from bench.fleet.counters import Fleet, settle
from bench.rig import Proxy
from bench.rivals import LITELLM, NGINX, RIVALS, SGLANG, find_nginx, nginx
from router.config.loader import ConfigError, read_yaml
from router.config.schema import PolicyConfig, PolicyName
from router.servers.program import free_port
from tests.support.servers.llama_server import LlamaServer

KVFERRY, URL = "kvferry", "url"
# Names on the command line.
_RIVALS = {"nginx": NGINX, "sglang": SGLANG, "litellm": LITELLM}
POLICIES = "policies"
_POLICY_NAMES = {name.name.lower(): name for name in PolicyName}
_LOGGING = "logging: {{format: json, level: {}}}"
# llama-server's default; the launcher's own flag is 0 and comes before.
_MOST_DOORS = 16
_RAM_CACHE = ("--cache-ram", "8192", "--kv-unified")  # as llama-server's plain defaults


@dataclass(frozen=True, slots=True)
class Contender:
    """The contender of one row. `more`: kvferry's policy, or the URL of a server.

    `doors`: routers that clients send to in turn. Of several kvferrys each is a host of its own,
    with its share of the servers; several other routers all have all servers.
    """

    kind: str
    more: str = ""
    ram_cache: bool = False
    doors: int = 1

    @property
    def name(self) -> str:
        """Return the name in the table."""
        if self.kind == URL:
            return self.more
        name = f"{self.kind}:{self.more}" if self.more else self.kind
        if self.doors > 1:
            name += f" x {self.doors}"
        return f"{name} + RAM cache" if self.ram_cache else name

    @property
    def missing(self) -> str | None:
        """Return what to install; None if all is there."""
        return RIVALS[_RIVALS[self.kind]].missing if self.kind in _RIVALS else None


def named(text: str) -> list[Contender]:
    """Parse one contender; `policies` is kvferry with each policy. Raises ArgumentTypeError."""
    if text != POLICIES:
        return [contender(text)]
    default = PolicyName.PREFER_IDLE
    others = [text for text, name in _POLICY_NAMES.items() if name is not default]
    return [Contender(KVFERRY), *(Contender(KVFERRY, other) for other in others)]


def contender(text: str) -> Contender:
    """Parse `kvferry`, `kvferry:POLICY`, `kvferry:KEY=VALUE,...`, both, another router, a URL.

    The keys are those of `policy` in kvferry's configuration. Policies may have their short names
    from `kvferry simulate`. `2*NAME`: two of that router. Raises ArgumentTypeError.
    """
    if text.startswith(("http://", "https://")):
        return Contender(URL, text.rstrip("/"))
    number, star, name = text.partition("*")
    if star:
        if not number.isdecimal() or not 1 <= int(number) <= _MOST_DOORS:
            raise argparse.ArgumentTypeError(f"{text!r}: before * comes a number of routers")
        return replace(contender(name), doors=int(number))
    kind, colon, more = text.partition(":")
    if kind != KVFERRY and kind not in _RIVALS:
        raise argparse.ArgumentTypeError(
            f"no such contender: {text!r} (kvferry, kvferry:POLICY, policies,"
            f" {', '.join(_RIVALS)}, URL)"
        )
    if colon and kind != KVFERRY:
        raise argparse.ArgumentTypeError(f"{kind} takes no policy: {text!r}")
    if colon:
        try:
            PolicyConfig.model_validate(_policy(more))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
        except ValidationError as error:
            said = "; ".join(str(problem["msg"]) for problem in error.errors())
            raise argparse.ArgumentTypeError(f"{text!r}: {said}") from None
    return Contender(kind, more)


def _policy(more: str) -> object:
    """Return `cheapest,max_wait=5s` as the configuration's mapping. Raises ConfigError.

    Without a name, the policy is the default.
    """
    parts = more.split(",")
    name = str(PolicyName.PREFER_IDLE) if "=" in parts[0] else parts.pop(0)
    name = _POLICY_NAMES.get(name, name)
    lines = [f"name: {name}", *(part.replace("=", ": ", 1) for part in parts)]
    return read_yaml("\n".join(lines), "policy").value


@dataclass(frozen=True, slots=True)
class Shape:
    """The llama-servers of every contender."""

    model: Path
    servers: int
    slots: int  # of each
    ctx_per_slot: int
    threads: int
    log_level: str = "info"  # of kvferry


@asynccontextmanager
async def running(contender: Contender, shape: Shape, home: Path) -> AsyncIterator[Fleet]:
    """Start fresh servers and the contender in front of them; `home` gets logs and states.

    A server at a URL is used as it is; a server beside it tokenizes the prompts.
    """
    if contender.kind == URL:
        async with LlamaServer(shape.model, ctx=1024, log_path=home / "tokens.log") as beside:
            yield Fleet((contender.more,), (), beside.url)
        return
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                LlamaServer(
                    shape.model,
                    slots=shape.slots,
                    ctx=shape.slots * shape.ctx_per_slot,
                    kv_dir=_kv_dir(contender, number, home),
                    threads=shape.threads,
                    log_path=home / f"llama-{number}.log",
                    extra_args=_RAM_CACHE if contender.ram_cache else (),
                )
            )
            for number in range(shape.servers)
        ]
        urls = [server.url for server in servers]
        peers = [free_port() for _ in range(contender.doors)]
        doors = [
            await stack.enter_async_context(_proxy(contender, at, peers, urls, home, shape))
            for at in range(contender.doors)
        ]
        own = [door.url for door in doors] if contender.kind == KVFERRY else []
        processes = [Proxy("llama", each.url, each.pid) for each in servers if each.pid is not None]
        fleet = Fleet(
            tuple(door.url for door in doors),
            tuple(urls),
            urls[0],
            tuple(own),
            tuple(doors),
            tuple(processes),
        )
        await settle(fleet)
        yield fleet


def _kv_dir(contender: Contender, server: int, home: Path) -> Path:
    """Return the KV directory of a server: each kvferry has its own."""
    if contender.kind != KVFERRY or contender.doors == 1:
        return home / "kv"
    return home / f"door-{server % contender.doors}" / "kv"


def _proxy(
    contender: Contender,
    at: int,
    peers: Sequence[int],
    urls: Sequence[str],
    home: Path,
    shape: Shape,
) -> AbstractAsyncContextManager[Proxy]:
    """Start router number `at`; `peers` are the ports that kvferrys have for each other."""
    home = home if len(peers) == 1 else home / f"door-{at}"
    home.mkdir(exist_ok=True)
    if contender.kind == KVFERRY:
        policy = json.dumps(_policy(contender.more or str(PolicyName.PREFER_IDLE)))
        more, kv_dir = _LOGGING.format(shape.log_level), home / "kv"
        if len(peers) > 1:
            urls = urls[at :: len(peers)]
            others = ", ".join(f"'http://127.0.0.1:{port}'" for port in peers)
            more += f"\nfleet: {{name: h{at}, listen: '127.0.0.1:{peers[at]}', peers: [{others}]}}"
        return rig.kvferry(KVFERRY, urls, home, kv_dir=kv_dir, policy=policy, more=more)
    if contender.kind == "nginx":  # with its defaults
        return nginx(str(find_nginx()), urls, home, keep=False)
    return RIVALS[_RIVALS[contender.kind]].running(urls, home)
