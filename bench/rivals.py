"""Other routers to compare with: where each is found, how it is installed, and its start.

Those of the package index are installed by `python -m bench.setup_rivals`.
"""

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.rig import Proxy, started
from router.servers.program import free_port

NGINX, SGLANG, LITELLM, LLAMA_SWAP = "nginx", "sglang-router", "litellm", "llama-swap"
PACKAGES = {SGLANG: "sglang-router==0.3.2", LITELLM: "litellm[proxy]"}


@dataclass(frozen=True)
class Rival:
    """Another router. `find` returns its program, or None; `hint`: how to get it."""

    name: str
    hint: str
    find: Callable[[], str | None]
    start: Callable[[str, Sequence[str], Path], AbstractAsyncContextManager[Proxy]]
    has_tokenize: bool = True  # llama-server's own routes

    @property
    def missing(self) -> str | None:
        """Return what to install; None if it is there."""
        return None if self.find() is not None else f"{self.name} left out: not found; {self.hint}"

    def running(self, backends: Sequence[str], folder: Path) -> AbstractAsyncContextManager[Proxy]:
        """Run it in front of `backends`."""
        program = self.find()
        assert program is not None, self.hint
        return self.start(program, backends, folder)


def home_of(rival: str) -> Path:
    """Return the path of the virtual environment that `bench.setup_rivals` makes."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvferry-bench" / rival


def find_nginx() -> str | None:
    """Return nginx's path or None. Debian's is not always on a user's PATH."""
    return shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


def _find_sglang() -> str | None:
    return os.environ.get("SGLANG_PYTHON") or shutil.which(str(home_of(SGLANG) / "bin" / "python"))


def _find_litellm() -> str | None:
    return shutil.which("litellm") or shutil.which(str(home_of(LITELLM) / "bin" / "litellm"))


@asynccontextmanager
async def nginx(
    program: str,
    backends: Sequence[str],
    folder: Path,
    *,
    keep: bool = True,
    connections: int = 1024,
) -> AsyncIterator[Proxy]:
    """Run nginx as a plain proxy, round robin over `backends`: one worker, no buffering.

    `keep`: keep connections on both sides, for single requests; else nginx's defaults hold.
    `connections`: limit for both sides together.
    """
    port = free_port()
    home = folder / "nginx"
    home.mkdir()
    user = "user root;" if os.geteuid() == 0 else ""
    temp = "".join(
        f"{kind}_temp_path {home}/{kind};\n  "
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # A disconnected client is no failure of the server: never leave a server out.
    servers = [f"server {url.removeprefix('http://')} max_fails=0;" for url in backends]
    if keep:  # llama-server drops idle connections after 5 s
        servers += ["keepalive 16;", "keepalive_timeout 2s;"]
    # llama-server closes after each stream without saying so. nginx may use that connection again.
    again = "proxy_next_upstream error timeout non_idempotent;" if keep else ""
    (home / "nginx.conf").write_text(f"""{user}
daemon off;
worker_processes 1;
pid {home}/pid;
error_log {home}/error.log;
events {{ worker_connections {connections}; }}
http {{
  access_log off;
  {temp}
  client_max_body_size 64m;
  client_body_buffer_size 4m;
  {"keepalive_requests 1000000;" if keep else ""}
  upstream llama {{
    {" ".join(servers)}
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://llama;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      {again}
      proxy_read_timeout 1h;
    }}
  }}
}}
""")
    argv = [program, "-e", f"{home}/error.log", "-p", str(home), "-c", f"{home}/nginx.conf"]
    async with started("nginx", argv, f"http://127.0.0.1:{port}", "/health", folder) as proxy:
        yield proxy


@asynccontextmanager
async def _sglang(python: str, backends: Sequence[str], folder: Path) -> AsyncIterator[Proxy]:
    """Run sglang-router with its cache-aware policy."""
    port = free_port()
    argv = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--prometheus-port", str(free_port())]
    argv += ["--policy", "cache_aware", "--log-level", "warn", "--worker-urls", *backends]
    # `readiness` is 200 once a worker has passed its health check.
    async with started("sglang", argv, f"http://127.0.0.1:{port}", "/readiness", folder) as proxy:
        yield proxy


@asynccontextmanager
async def _litellm(program: str, backends: Sequence[str], folder: Path) -> AsyncIterator[Proxy]:
    """Run LiteLLM's proxy, one process, with its default strategy (a random one of the servers)."""
    port = free_port()
    models = [
        {
            "model_name": "any",
            "litellm_params": {
                "model": "openai/any",
                "api_base": f"{url}/v1",
                "api_key": "none",
                "timeout": 3600,
            },
        }
        for url in backends
    ]
    config = folder / "litellm.yaml"
    config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
    argv = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    env = os.environ | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    url = f"http://127.0.0.1:{port}"
    async with started("litellm", argv, url, "/health/liveliness", folder, env) as proxy:
        yield proxy


@asynccontextmanager
async def _llama_swap(program: str, backends: Sequence[str], folder: Path) -> AsyncIterator[Proxy]:
    """Run llama-swap with one model, whose server runs already."""
    port = free_port()
    (url,) = backends
    model = {"cmd": "sleep 86400", "proxy": url, "checkEndpoint": "/health"}
    config = folder / "llama-swap.yaml"
    config.write_text(json.dumps({"models": {"any": model}}))
    argv = [program, "--config", str(config), "--listen", f"127.0.0.1:{port}"]
    at = f"http://127.0.0.1:{port}"
    async with started("llama-swap", argv, at, "/health", folder) as proxy:
        yield proxy


_SETUP = "python -m bench.setup_rivals"
RIVALS = {
    rival.name: rival
    for rival in (
        Rival(NGINX, "apt-get install -y nginx-light", find_nginx, nginx),
        Rival(SGLANG, f"{_SETUP} {SGLANG}", _find_sglang, _sglang, has_tokenize=False),
        Rival(LITELLM, f"{_SETUP} {LITELLM}", _find_litellm, _litellm, has_tokenize=False),
        Rival(
            LLAMA_SWAP,
            "a binary of llama-swap on PATH",
            lambda: shutil.which("llama-swap"),
            _llama_swap,
            has_tokenize=False,
        ),
    )
}
