"""Keeps what traffic taught of speeds over a restart of the router."""

import asyncio
from functools import partial

import structlog

from router.base.errors import KvError
from router.base.types import LearnedRates, Namespace
from router.core.model import events as ev
from router.engine.engine import Engine
from router.store.learned_rates import read_rates, write_rates
from router.store.store import KvStore

log = structlog.get_logger(__name__)

_INTERVAL_S = 300.0


class RatesKeeper:
    """Reads the rates of all KV directories, and writes them now and then."""

    def __init__(self, store: KvStore, engine: Engine) -> None:
        self._store = store
        self._engine = engine

    async def load(self) -> None:
        """Tell the engine what earlier runs learned."""
        found: dict[Namespace, LearnedRates] = {}
        for kv_dir in self._store.kv_dirs:
            try:
                found |= await self._store.journal(kv_dir, partial(read_rates, kv_dir))
            except KvError as error:
                log.debug("rates_not_read", kv_dir=kv_dir, reason=str(error))
        self._engine.tell(ev.RatesFound(found))

    async def save(self) -> None:
        """Write what is known now; a failure costs only the next run's first estimates."""
        for kv_dir, rates in self._engine.view.learned_rates().items():
            try:
                await self._store.journal(kv_dir, partial(write_rates, kv_dir, rates))
            except KvError as error:
                log.debug("rates_not_written", kv_dir=kv_dir, reason=str(error))

    async def run(self) -> None:
        """Write them now and then, until cancelled: a crash loses little."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.save()
