"""Reads the configuration file again while the router runs: takes over all of it, or nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import structlog

from router.assembly.backends import StartError, read
from router.base.errors import ConflictError, InvalidConfigError, KvError, RouterError
from router.base.ports import Spawn
from router.config.diff import Change, Changes, compare
from router.config.schema import NO_FLAGS, Config, ConfigError, Problem, load, path_text

log = structlog.get_logger(__name__)


class Reload:
    """The configuration in force. A call reads the file again."""

    def __init__(
        self,
        path: Path | None,
        config: Config,
        take: Callable[[Config], Awaitable[None]],
        spawn: Spawn,
        flags: Mapping[str, object] = NO_FLAGS,
    ) -> None:
        """Start with `config` in force. `path` None: there is no file. `flags` win over the file.

        `take` puts a configuration in force, or raises StartError or KvError with nothing changed.
        """
        self.config = config
        self._path = path
        self._flags = flags
        self._take = take
        self._turn = asyncio.Lock()
        self._spawn = spawn

    async def __call__(self) -> dict[str, object]:
        """Read the file again and return what changed, for JSON.

        Raises InvalidConfigError or ConflictError with nothing changed. Logs one line either way.
        A cancelled caller does not stop it: a reload must not end halfway.
        """
        done: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._spawn(self._to_its_end(done), name="reload")
        return await asyncio.shield(done)

    async def _to_its_end(self, done: asyncio.Future[dict[str, object]]) -> None:
        try:
            done.set_result(await self._told())
        except BaseException as error:
            done.set_exception(error)
            done.exception()  # marks it retrieved: the caller may be gone
            if not isinstance(error, RouterError):
                raise

    async def _told(self) -> dict[str, object]:
        async with self._turn:
            try:
                changes = await self._reload()
            except (ConflictError, InvalidConfigError) as error:
                log.error("reload_failed", reason=str(error))
                raise
        told = _told(changes)
        log.info("reloaded", **told)
        return told

    async def _reload(self) -> Changes:
        if self._path is None:
            raise ConflictError("kvferry was started without --config: there is no file to read")
        try:
            wanted = await read(partial(load, self._path, self._flags), str(self._path))
            changes = compare(self.config, wanted)
            if misfits := changes.config.misfits():
                pending = ", ".join(change.key for change in changes.needs_restart)
                raise ConfigError(
                    str(self._path),
                    [
                        Problem(path_text(path), None, f"{message} (needs a restart: {pending})")
                        for path, message in misfits
                    ],
                )
            await self._take(changes.config)
        except ConfigError as error:
            raise InvalidConfigError(str(error), [_problem(p) for p in error.problems]) from error
        except (StartError, KvError) as error:
            raise InvalidConfigError(str(error)) from error
        self.config = changes.config
        return changes


def _problem(problem: Problem) -> dict[str, object]:
    return {"key": problem.path, "line": problem.line, "message": problem.message}


def _told(changes: Changes) -> dict[str, object]:
    return {
        "changed": [_change(change) for change in changes.applied],
        "backends": {
            "added": changes.added,
            "removed": changes.removed,
            "changed": changes.replaced,
        },
        "needs_restart": [_change(change) for change in changes.needs_restart],
    }


def _change(change: Change) -> dict[str, object]:
    return {"key": change.key, "from": _plain(change.before), "to": _plain(change.after)}


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else str(value)
