"""Compare two configurations: which changes a running router can apply, which need a restart."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from router.base.types import BackendId
from router.config.schema import BackendConfig, Config
from router.config.values import format_duration, format_size

# Applied at once; all other keys need a restart, new keys included.
_LIVE = frozenset(
    {
        *("store.max_bytes", "store.max_tokens", "store.min_tokens"),
        *("store.idle_save_after", "store.save_on_shutdown", "store.protected_share"),
        *("policy", "queue", "answers", "limits", "health", "probe", "auth", "browsers"),
        "filters",
        *("logging.level", "shutdown_grace", "tls.certificate", "tls.key"),
    }
)
# An open port can take other TLS files, but cannot begin or stop to speak TLS.
_TLS = frozenset({"tls.certificate", "tls.key"})
# These keys decide whether there are snapshots at all: directories are opened and backends are
# probed for snapshots when the router starts.
_SWITCHES = frozenset({"store.max_bytes", "store.max_tokens", "policy.name"})


@dataclass(frozen=True, slots=True)
class Change:
    """One changed key. Sizes and times as the file has them; a list as the names of its entries."""

    key: str
    before: object
    after: object


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes by kind. `config` is in force when all but `needs_restart` is applied."""

    config: Config
    applied: tuple[Change, ...]
    needs_restart: tuple[Change, ...]
    added: tuple[BackendId, ...]
    removed: tuple[BackendId, ...]
    replaced: tuple[BackendId, ...]  # the same name, otherwise configured


def compare(old: Config, new: Config) -> Changes:
    """Return the changes from the old configuration to the new one."""
    fixed = frozenset[str]() if old.keeps_snapshots == new.keeps_snapshots else _SWITCHES
    fixed |= _TLS if (old.tls.key is None) != (new.tls.key is None) else frozenset()
    applied: list[Change] = []
    needs_restart: list[Change] = []
    kept: dict[str, Any] = {}
    for section, name, change in _differences(old, new):
        top = change.key.partition(".")[0]
        if change.key not in fixed and (change.key in _LIVE or top in _LIVE):
            applied.append(change)
            continue
        needs_restart.append(change)
        if section is None:
            kept[name] = getattr(old, name)
        else:
            before = getattr(getattr(old, section), name)
            now = kept.get(section, getattr(new, section))
            kept[section] = now.model_copy(update={name: before})
    was, wanted = _by_name(old), _by_name(new)
    return Changes(
        config=new.model_copy(update=kept),
        applied=tuple(applied),
        needs_restart=tuple(needs_restart),
        added=tuple(name for name in wanted if name not in was),
        removed=tuple(name for name in was if name not in wanted),
        replaced=tuple(n for n in wanted if n in was and wanted[n] != was[n]),
    )


def _by_name(config: Config) -> dict[BackendId, BackendConfig]:
    return {backend.name: backend for backend in config.backends}


def _differences(old: Config, new: Config) -> Iterator[tuple[str | None, str, Change]]:
    """Yield section (None: top level), field and change of each key but `backends`."""
    for name, info in Config.model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        key = info.alias or name
        if isinstance(before, BaseModel):
            for inner, below in type(before).model_fields.items():
                was, now = getattr(before, inner), getattr(after, inner)
                if was != now:
                    yield name, inner, _change(f"{key}.{below.alias or inner}", inner, was, now)
        elif name != "backends" and before != after:
            yield None, name, _change(key, name, before, after)


def _change(key: str, field: str, before: object, after: object) -> Change:
    was, now = _written(field, before), _written(field, after)
    # Only the hash of a key differs, and hashes are not shown.
    return Change(key, was, f"{now} (other contents)" if was == now else now)


def _written(field: str, value: object) -> object:
    """Return the value as a file has it. The name of the field ends in its unit."""
    if field.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    if field.endswith("_s") and isinstance(value, int | float | None):
        return format_duration(value)
    if isinstance(value, tuple):
        return ", ".join(str(getattr(one, "name", one)) for one in value) or "none"
    return value
