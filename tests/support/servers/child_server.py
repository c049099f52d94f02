"""A server of another project in a process of its own, which can be killed and paused."""

import asyncio
import signal
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class ChildServer:
    """One process, of which the subclass knows how to start it."""

    _process: asyncio.subprocess.Process | None = field(default=None, init=False)

    async def kill(self) -> None:
        """Kill it, as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it from answering, its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
