"""What differs between two configurations, and how much of it a running router can take over."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from router.base.types import BackendId
from router.config.schema import Backend, Config
from router.config.values import format_duration, format_size
from router.core.model.policy import Policy

# Taken over at once; everything else needs a restart, keys that are new among them.
_LIVE = frozenset(
    {
        *("store.max_bytes", "store.max_tokens", "store.min_tokens"),
        *("store.save_when_idle_for", "store.save_on_shutdown"),
        *("policy", "queue", "limits", "health", "probe", "auth"),
        *("logging.level", "shutdown_grace", "tls.certificate", "tls.key"),
    }
)
# A port that speaks TLS takes other files, and no other protocol.
_TLS = frozenset({"tls.certificate", "tls.key"})
# What decides whether there are snapshots at all: directories are opened and backends tried out
# for that when the router starts.
_SWITCHES = frozenset({"store.max_bytes", "store.max_tokens", "policy.name"})


@dataclass(frozen=True, slots=True)
class Change:
    """One key; sizes and times as the file has them, of lists the names of what is in them."""

    key: str
    before: object
    after: object


@dataclass(frozen=True, slots=True)
class Changes:
    """`config` is what is in force when all but `needs_restart` is taken over."""

    config: Config
    taken: tuple[Change, ...]
    needs_restart: tuple[Change, ...]
    added: tuple[BackendId, ...]
    removed: tuple[BackendId, ...]
    replaced: tuple[BackendId, ...]  # the same name, otherwise configured


def compare(old: Config, new: Config) -> Changes:
    """What has to happen to get from one to the other."""
    fixed = frozenset[str]() if _keeps_snapshots(old) == _keeps_snapshots(new) else _SWITCHES
    fixed |= _TLS if (old.tls.key is None) != (new.tls.key is None) else frozenset()
    taken: list[Change] = []
    left: list[Change] = []
    kept: dict[str, Any] = {}
    for section, name, change in _differences(old, new):
        top = change.key.partition(".")[0]
        if change.key not in fixed and (change.key in _LIVE or top in _LIVE):
            taken.append(change)
            continue
        left.append(change)
        if section is None:
            kept[name] = getattr(old, name)
        else:
            before = getattr(getattr(old, section), name)
            now = kept.get(section, getattr(new, section))
            kept[section] = now.model_copy(update={name: before})
    was, wanted = _by_name(old), _by_name(new)
    return Changes(
        config=new.model_copy(update=kept),
        taken=tuple(taken),
        needs_restart=tuple(left),
        added=tuple(name for name in wanted if name not in was),
        removed=tuple(name for name in was if name not in wanted),
        replaced=tuple(n for n in wanted if n in was and wanted[n] != was[n]),
    )


def _keeps_snapshots(config: Config) -> bool:
    return config.store.enabled and Policy(name=config.policy.name).moves_kv


def _by_name(config: Config) -> dict[BackendId, Backend]:
    return {backend.name: backend for backend in config.backends}


def _differences(old: Config, new: Config) -> Iterator[tuple[str | None, str, Change]]:
    """Section (None: at the top), field and change of each key that differs, backends apart."""
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
    # A key of which only the hash is another: hashes are not repeated.
    return Change(key, was, f"{now} (other contents)" if was == now else now)


def _written(field: str, value: object) -> object:
    """As a person writes it: the unit of a number stands in the name of its field."""
    if field.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    if field.endswith("_s") and isinstance(value, int | float | None):
        return format_duration(value)
    if isinstance(value, tuple):
        return ", ".join(str(getattr(one, "name", one)) for one in value) or "none"
    return value
