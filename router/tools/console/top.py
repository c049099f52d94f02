"""`kvferry top`: backends, slots and queue, refreshed every second."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from router.tools.console.client import CallError, RouterClient, connected
from router.tools.console.rates import NONE, Figures, began_anew, read_figures, recent
from router.tools.console.view import View, picture
from router.tools.terminal import output

INTERVAL_S = 1.0
WINDOW_S = 60.0
_DECISIONS = 20


@dataclass(slots=True)
class History:
    """Figures of the last minute, with the clock seconds at which they were read."""

    _scrapes: deque[tuple[float, Figures]] = field(default_factory=deque)

    def add(self, now: float, figures: Figures) -> tuple[Figures, float | None]:
        """Add `figures`; return the figures to compare with and their age in seconds.

        The first time, and after a restart of the router, these are NONE and None.
        """
        scrapes = self._scrapes
        if scrapes and began_anew(scrapes[-1][1], figures):
            scrapes.clear()
        # The newest entry older than the window stays, so that all of the window is covered.
        while len(scrapes) > 1 and now - scrapes[1][0] >= WINDOW_S:
            scrapes.popleft()
        scrapes.append((now, figures))
        if len(scrapes) == 1:
            return NONE, None
        began, before = scrapes[0]
        return before, now - began


async def top(url: str, *, once: bool) -> int:
    """Show the state until Ctrl-C; once without a terminal. Raises CallError at the start."""
    console = output()
    async with connected(url) as client:
        history = History()
        view = await scrape(client, history)
        if once or not console.is_terminal:
            console.print(picture(view, console.width))
            return 0
        await _live(console, client, history, view)
    return 0


async def _live(console: Console, client: RouterClient, history: History, view: View) -> None:
    """Show the state every second. Without a router show the last picture, and try again."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        trouble: str | None = None
        while True:
            drawn = picture(view, console.width, console.height - (trouble is not None))
            if trouble is not None:
                drawn = Group(Text(trouble, "bold red", no_wrap=True, overflow="ellipsis"), drawn)
            live.update(drawn, refresh=True)
            await asyncio.sleep(INTERVAL_S)
            try:
                view, trouble = await scrape(client, history), None
            except CallError as error:
                trouble = f"{error}; trying again"


async def scrape(client: RouterClient, history: History) -> View:
    """Return a view of the router now. Raises CallError."""
    state, decisions = await client.state(), await client.decisions(_DECISIONS)
    figures = read_figures(await client.metrics())
    before, since_s = history.add(asyncio.get_running_loop().time(), figures)
    clock = datetime.now().astimezone().strftime("%H:%M:%S")
    return View(client.url, state, recent(before, figures), since_s, decisions, clock)
