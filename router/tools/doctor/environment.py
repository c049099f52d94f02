"""What a right configuration lacks on this machine: why `kvferry serve` would not start with it.

For `kvferry check` and `kvferry doctor`. What only starting tells, such as an address that somebody
else has, is not looked at: a router may be running with the same configuration.
"""

import os
from dataclasses import dataclass

from router.config.loader import KeyPath
from router.config.schema import Config, TokenizerMode
from router.prompts.local_tokenizer import LocalTokenizerError, load_local
from router.web.server import tls


@dataclass(frozen=True, slots=True)
class Lack:
    """The key that names what is not there, and what to do."""

    path: KeyPath
    message: str


def unset_variables(config: Config) -> list[Lack]:
    """The environment's part. Another shell than the router's may lack them, and rightly so."""
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
    """A router asks its backends instead, so it starts. Blocking, seconds: it is read."""
    path = config.tokenizer.path
    if config.tokenizer.mode is not TokenizerMode.LOCAL or path is None:
        return []
    try:
        load_local(path)
    except LocalTokenizerError as error:
        return [Lack(("tokenizer", "path"), f"{path} is not used: {error}")]
    return []


def unusable_parts(config: Config) -> list[Lack]:
    """Files and packages. Blocking."""
    lacks: list[Lack] = []
    if config.tracing.endpoint is not None and not _can_trace():
        lacks.append(Lack(("tracing", "endpoint"), "needs `pip install 'kvferry[otel]'`"))
    if config.tls.certificate is not None and config.tls.key is not None:
        try:
            tls.warning(config.tls.certificate, config.tls.key)
        except tls.TlsError as error:
            key, _, message = str(error).partition(": ")  # it begins with the key
            lacks.append(Lack(tuple(key.split(".")), message))
    return lacks


def _can_trace() -> bool:
    """By doing what `serve` does: parts of the SDK may be there without the others."""
    try:
        import router.telemetry.tracing  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True
