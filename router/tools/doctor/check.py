"""What `kvferry check` says of a configuration: what would run, and what in it has no effect."""

from collections.abc import Iterator
from pathlib import Path

from router.config.loader import path_text, read_text, read_yaml
from router.config.schema import BackendConfig, Config, ConfigError, Problem, TokenizerMode, load
from router.config.values import NO_LIMIT, format_duration, format_size
from router.core.model.policy import Policy
from router.tools.doctor.environment import (
    Lack,
    unset_variables,
    unusable_parts,
    unusable_tokenizer,
)
from router.web.server import tls


def check_text(path: Path) -> tuple[int, str]:
    """What `kvferry check FILE` prints, and its exit status: 0 when the file is good, 2 if not."""
    try:
        config = load(path)
    except ConfigError as error:
        return 2, str(error)
    if lacks := unusable_parts(config):
        return 2, str(_placed(lacks, path))
    return 0, summary(config) + "".join(f" Warning: {what}." for what in _warnings(config))


def _placed(lacks: list[Lack], path: Path) -> ConfigError:
    """With their lines. Raises ConfigError if the file has just been made another."""
    document = read_yaml(read_text(path), str(path))
    return ConfigError(
        str(path),
        [Problem(path_text(one.path), document.line(one.path), one.message) for one in lacks],
    )


def _warnings(config: Config) -> Iterator[str]:
    """What can be used and is not as it should be, or not here. Blocking."""
    if config.tls.certificate is not None and config.tls.key is not None:
        problem = tls.warning(config.tls.certificate, config.tls.key)
        if problem is not None:
            yield problem
    # The router's environment is often another than the one in which the file is checked.
    for lack in unset_variables(config) + unusable_tokenizer(config):
        yield f"{path_text(lack.path)} {lack.message}"


def summary(config: Config) -> str:
    """One paragraph: what would run, and what in it will have no effect."""
    backends = ", ".join(_described(backend) for backend in config.backends)
    store, policy = config.store, config.policy
    said = [
        f"OK: kvferry would listen on {_listened(config)} and serve"
        f" {len(config.backends)} backend{'s' * (len(config.backends) != 1)}: {backends}.",
        f"Policy {policy.name}; tokenizer {config.tokenizer.mode};"
        f" up to {config.queue.max_requests} requests wait,"
        f" each at most {_or_no_limit(config.queue.deadline_s)}.",
    ]
    moves_kv = Policy(name=policy.name).moves_kv
    # (1) to (4): the first reason why no snapshot is ever written. (5): what is written.
    if not moves_kv:
        said.append(f"Nothing is saved or restored: policy {policy.name} never moves KV.")
    elif not any(backend.kv_dir for backend in config.backends):
        said.append("Nothing is saved or restored: no backend has a kv_dir.")
    elif not store.enabled:
        said.append("Nothing is saved: the store is off.")
    elif not config.probe.enabled:
        said.append(
            "Nothing is saved or restored: without the probe no backend is trusted with it."
        )
    else:
        limits = [] if store.max_bytes == NO_LIMIT else [format_size(store.max_bytes)]
        limits += [] if store.max_tokens == NO_LIMIT else [f"{store.max_tokens} tokens"]
        said.append(
            f"Snapshots of at least {store.min_tokens} tokens are kept,"
            f" {'up to ' + ' and '.join(limits) if limits else 'without limit'}."
        )
    if keys := config.auth.keys:
        n_tenants = len({key.tenant for key in keys})
        said.append(
            f"{len(keys)} key{'s' * (len(keys) != 1)} of {n_tenants}"
            f" tenant{'s' * (n_tenants != 1)} let clients in; what is computed for one tenant is"
            f" {'' if not config.auth.keeps_apart else 'not '}reused for others."
        )
    if moves_kv and config.tokenizer.mode is TokenizerMode.OFF:
        said.append("With tokenizer.mode: off no prompt is known, so nothing can be reused.")
    return " ".join(said)


def _or_no_limit(seconds: float | None) -> str:
    return "as long as it takes" if seconds is None else format_duration(seconds)


def _listened(config: Config) -> str:
    protocol = "" if config.tls.certificate is None else " (TLS)"
    own = config.admin.listen
    return f"{config.listen}{protocol}" + (f", for operators on {own}{protocol}," if own else "")


def _described(backend: BackendConfig) -> str:
    place = f"kv_dir {backend.kv_dir}" if backend.kv_dir else "no kv_dir"
    return f"{backend.name} ({backend.url}, {place})"
