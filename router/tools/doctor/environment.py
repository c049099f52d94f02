"""Find what a valid configuration needs and this machine lacks, for `check` and `doctor`.

Problems that only a start shows, such as an address in use, are not checked: a router may be
running with the same configuration.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec

from router.config.loader import KeyPath
from router.config.schema import Config, TokenizerMode
from router.prompts.local_tokenizer import LocalTokenizerError, load_local
from router.web.server import tls


@dataclass(frozen=True, slots=True)
class Lack:
    """One missing thing: the configuration key that names it, and a message."""

    path: KeyPath
    message: str


def unset_variables(config: Config) -> list[Lack]:
    """Return the named environment variables that are not set.

    They may be missing here and still be set where the router runs.
    """
    named: list[tuple[KeyPath, str | None]] = [
        (("backends", i, "api_key_env"), backend.api_key_env)
        for i, backend in enumerate(config.backends)
    ]
    named.append((("admin", "token_env"), config.admin.token_env))
    return [
        Lack(path, f"names {name}, which is not set in the environment")
        for path, name in named
        if name is not None and not os.environ.get(name)
    ]


def unusable_tokenizer(config: Config) -> list[Lack]:
    """Return the local tokenizer if it cannot be loaded. Blocking: loading takes seconds.

    A router starts without the local tokenizer and tokenizes with its backends instead.
    """
    path = config.tokenizer.path
    if config.tokenizer.mode is not TokenizerMode.LOCAL or path is None:
        return []
    try:
        load_local(path)
    except LocalTokenizerError as error:
        return [Lack(("tokenizer", "path"), f"{path} is not used: {error}")]
    return []


def unusable_parts(config: Config) -> list[Lack]:
    """Return the unusable files and missing packages. Blocking."""
    lacks: list[Lack] = []
    if config.tracing.endpoint is not None and not _can_trace():
        lacks.append(Lack(("tracing", "endpoint"), "needs `pip install 'kvferry[otel]'`"))
    if config.fleet.redis is not None and find_spec("redis") is None:
        lacks.append(Lack(("fleet", "redis"), "needs `pip install 'kvferry[fleet]'`"))
    needs_obstore = config.cold.url is not None and not config.cold.url.startswith("/")
    if needs_obstore and find_spec("obstore") is None:
        lacks.append(Lack(("cold", "url"), "needs `pip install 'kvferry[cold]'`"))
    if config.tls.certificate is not None and config.tls.key is not None:
        try:
            tls.warning(config.tls.certificate, config.tls.key)
        except tls.TlsError as error:
            key, _, message = str(error).partition(": ")  # the error begins with the key
            lacks.append(Lack(tuple(key.split(".")), message))
    return lacks


def _can_trace() -> bool:
    """Return whether tracing can be imported, as `serve` does: the SDK may be incomplete."""
    try:
        import router.telemetry.tracing  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True
