"""`kvferry drain`, `undrain` and `reload`: an operator's actions on a running router."""

import asyncio
from math import inf

from router.tools.console.client import CallError, Json, connected
from router.tools.terminal import output

_POLL_S = 0.5
# Time for the probe of a healthy backend; with a large model it takes seconds.
_ATTACH_S = 15.0


async def drain(url: str, name: str) -> int:
    """Drain a backend, and print the progress until it is drained. Raises CallError.

    The drain goes on if this command is interrupted.
    """
    console = output()
    async with connected(url) as client:
        await client.call("POST", f"/kvferry/backends/{name}/drain")
        said = ""
        while True:
            state = await client.state()
            backend = next((one for one in state["backends"] if one["name"] == name), None)
            if backend is None or backend["state"] == "drained":
                break
            if backend["state"] != "draining":
                raise CallError(f"{name} is {backend['state']}: another command ended the drain")
            if (saying := _progress(name, state)) != said:
                said = saying
                console.print(said, soft_wrap=True)
            await asyncio.sleep(_POLL_S)
        console.print(f"{name}: drained", soft_wrap=True)
    return 0


def _progress(name: str, state: Json) -> str:
    """Return a line with the slots that the drain still waits for."""
    phases = [slot["phase"] for slot in state["slots"] if slot["backend"] == name]
    doing = {"running": "answering", "preparing": "saving or preparing", "abandoned": "abandoned"}
    counts = ((phases.count(phase), words) for phase, words in doing.items())
    remaining = ", ".join(f"{n} {words}" for n, words in counts if n)
    return f"{name}: draining; slots: {remaining or 'none in use'}"


async def undrain(url: str, name: str) -> int:
    """Undrain a backend, and wait up to 15 s until it is up. Raises CallError."""
    async with connected(url) as client:
        await client.call("POST", f"/kvferry/backends/{name}/undrain")
        backend: Json | None = None
        for _ in range(round(_ATTACH_S / _POLL_S)):
            state = await client.state()
            backend = next((one for one in state["backends"] if one["name"] == name), None)
            # A backend that is down is being probed, which takes seconds, or is unreachable.
            if backend is None or backend["state"] != "down":
                break
            await asyncio.sleep(_POLL_S)
    found = "gone" if backend is None else backend["state"]
    if found == "up":
        said = "in use again"
    elif found == "down" and backend is not None:
        said = f"not drained any more, and down: {backend['problem']}"
    else:
        said = f"{found}: another command changed it meanwhile"
    output().print(f"{name}: {said}", soft_wrap=True)
    return 0


async def reload(url: str) -> int:
    """Reload the configuration, and print one line for each change. Raises CallError.

    There is no timeout, since reading large directories takes time.
    """
    async with connected(url) as client:
        answer = await client.call("POST", "/kvferry/reload", timeout_s=inf)
    lines = [f"{what}: {name}" for what, names in answer["backends"].items() for name in names]
    lines += [_line(change) for change in answer["changed"]]
    lines += [f"needs a restart: {_line(change)}" for change in answer["needs_restart"]]
    for line in lines or ["nothing has changed"]:
        output().print(line, soft_wrap=True)
    return 0


def _line(change: Json) -> str:
    return f"{change['key']}: {change['from']} -> {change['to']}"
