"""Check a configuration for `kvferry check`: what would run, and what has no effect."""

from collections.abc import Iterator
from pathlib import Path

from router.config.loader import path_text, read_text, read_yaml
from router.config.open_doors import open_doors
from router.config.schema import BackendConfig, Config, ConfigError, Problem, TokenizerMode, load
from router.config.values import NO_LIMIT, format_duration, format_size
from router.tools.doctor.environment import (
    Lack,
    unset_variables,
    unusable_parts,
    unusable_tokenizer,
)
from router.web.server import tls


def check_text(path: Path) -> tuple[int, str]:
    """Return the output of `kvferry check FILE` and its exit code: 0 for a good file, else 2."""
    try:
        config = load(path)
    except ConfigError as error:
        return 2, str(error)
    if lacks := unusable_parts(config):
        return 2, str(_with_lines(lacks, path))
    return 0, summary(config) + "".join(f" Warning: {what}." for what in _warnings(config))


def _with_lines(lacks: list[Lack], path: Path) -> ConfigError:
    """Return a ConfigError that lists `lacks` with their lines.

    Raises ConfigError if the file has become invalid since it was loaded.
    """
    document = read_yaml(read_text(path), str(path))
    return ConfigError(
        str(path),
        [Problem(path_text(one.path), document.line(one.path), one.message) for one in lacks],
    )


def _warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each part that is not right or missing, but usable. Blocking."""
    if config.tls.certificate is not None and config.tls.key is not None:
        problem = tls.warning(config.tls.certificate, config.tls.key)
        if problem is not None:
            yield problem
    # Only warnings: the router often runs in another environment than `kvferry check`.
    for lack in unset_variables(config) + unusable_tokenizer(config):
        yield f"{path_text(lack.path)} {lack.message}"
    for at, model in enumerate(config.servers.models):
        if model.model is not None and not model.model.is_file():
            path = ("servers", "models", at, "model")
            yield f"{path_text(path)} {model.model} is no file on this machine"
    for door in open_doors(config):
        yield f"{door.what}; {door.remedy}"


def summary(config: Config) -> str:
    """Describe in one paragraph what would run, and what would have no effect."""
    store, policy = config.store, config.policy
    said = [
        f"OK: kvferry would listen on {_listened(config)} and {_served(config)}.",
        f"Policy {policy.name}; tokenizer {config.tokenizer.mode};"
        f" queue of up to {config.queue.max_requests} requests,"
        f" deadline {_or_no_limit(config.queue.deadline_s)}.",
    ]
    moves_kv = policy.name.moves_kv
    # The first reason why no snapshot is written; else the limits of what is written.
    if not moves_kv:
        said.append(f"Nothing is saved or restored: policy {policy.name} never moves KV.")
    elif not any(backend.kv_dir for backend in config.backends) and not config.servers.models:
        said.append("Nothing is saved or restored: no backend has a kv_dir.")
    elif not store.enabled:
        said.append("Nothing is saved: the store is off (max_bytes or max_tokens is 0).")
    elif not config.probe.enabled:
        said.append(
            "Nothing is saved or restored: probe.enabled is false, and only probed backends"
            " may save and restore."
        )
    else:
        limits = [] if store.max_bytes == NO_LIMIT else [format_size(store.max_bytes)]
        limits += [] if store.max_tokens == NO_LIMIT else [f"{store.max_tokens} tokens"]
        said.append(
            f"Snapshots of at least {store.min_tokens} tokens are kept,"
            f" {'up to ' + ' and '.join(limits) if limits else 'without limit'}."
        )
        if store.blobs is not None:
            a_day = store.max_written_per_day
            at_most = "" if a_day == NO_LIMIT else f", at most {format_size(a_day)} a day"
            said.append(f"They are written as blobs to {store.blobs}{at_most}.")
        if (cold := config.cold).url is not None:
            how = "as they are" if cold.key_file is None else "encrypted"
            after = format_duration(cold.after_s)
            said.append(f"They are copied to {cold.url} when {after} old, {how}.")
    if keys := config.auth.keys:
        n_tenants = len({key.tenant for key in keys})
        said.append(
            f"Clients need a key ({len(keys)} key{'s' * (len(keys) != 1)} of {n_tenants}"
            f" tenant{'s' * (n_tenants != 1)}); KV computed for one tenant is"
            f" {'' if not config.auth.keeps_apart else 'not '}reused for other tenants."
        )
    if moves_kv and config.tokenizer.mode is TokenizerMode.OFF:
        said.append("tokenizer.mode is off: prompts are not tokenized, so nothing is reused.")
    return " ".join(said)


def _or_no_limit(seconds: float | None) -> str:
    return "none" if seconds is None else format_duration(seconds)


def _listened(config: Config) -> str:
    protocol = "" if config.tls.certificate is None else " (TLS)"
    own = config.admin.listen
    return f"{config.listen}{protocol}" + (f", for operators on {own}{protocol}," if own else "")


def _served(config: Config) -> str:
    """Return the backends, and the models that servers are started for."""
    said = []
    if found := config.backends:
        backends = ", ".join(_described(backend) for backend in found)
        said.append(f"serve {len(found)} backend{'s' * (len(found) != 1)}: {backends}")
    if models := config.servers.models:
        names = ", ".join(model.name for model in models)
        loaded = config.servers.loaded
        at_a_time = "" if loaded is None else f", at most {loaded} at a time"
        said.append(
            f"start servers for {len(models)} model{'s' * (len(models) != 1)}{at_a_time}: {names}"
        )
    return "; and ".join(said)


def _described(backend: BackendConfig) -> str:
    place = f"kv_dir {backend.kv_dir}" if backend.kv_dir else "no kv_dir"
    return f"{backend.name} ({backend.url}, {place})"
