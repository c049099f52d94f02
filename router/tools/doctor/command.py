"""`kvferry doctor`: examine every backend, try save and restore, say what to change.

`facts.py` gathers facts, `findings.py` and `together.py` turn them into findings, and this module
prints the findings. The doctor may run beside a router with the same servers and directories.
"""

import asyncio
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from router.base.types import Namespace
from router.config.schema import Config
from router.llama.server_client import Connections
from router.tools.doctor.certificates import of_certificates
from router.tools.doctor.cold import of_cold
from router.tools.doctor.disk import of_disks
from router.tools.doctor.facts import Facts, gather
from router.tools.doctor.findings import Finding, Level, of_backend
from router.tools.doctor.hosts import of_hosts
from router.tools.doctor.together import of_several, verdict
from router.tools.terminal import Progress, no_log_lines, output

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "red"}

_INDENT = 10  # columns for the level


async def doctor(config: Config) -> int:
    """Print the findings. Returns the exit code of `verdict`: 0 if ready, else 1."""
    all_facts = await examine(config)
    console = output()
    for facts in all_facts:
        _print(console, f"{facts.name}  {facts.backend.url}", of_backend(facts))
    if together := of_several(all_facts, config):
        _print(console, "together", together)
    if disk := await asyncio.to_thread(of_disks, config):
        _print(console, "disk", disk)
    if certificates := await of_certificates(config):
        _print(console, "certificates", certificates)
    if cold := await of_cold(config):
        _print(console, "cold tier", cold)
    if others := await of_hosts(config, all_facts):
        _print(console, "other hosts", others)
    code, text = verdict(all_facts, config, cold)
    console.print(Text(text, style="bold green" if code == 0 else "bold red"))
    return code


async def examine(config: Config) -> list[Facts]:
    """Gather the facts about each backend, one backend after the other.

    In parallel, servers on one machine would slow each other down and distort the timings.
    """
    all_facts: list[Facts] = []
    known: set[Namespace] = set()
    with no_log_lines(), Progress() as progress:
        async with Connections() as connections:
            for backend in config.backends:
                progress(f"trying {backend.name} ({backend.url})")
                facts = await gather(backend, config, connections, known)
                all_facts.append(facts)
                if facts.attached is not None and not facts.untried:
                    known.add(facts.attached.info.namespace)
    return all_facts


def _print(console: Console, title: str, findings: Sequence[Finding]) -> None:
    """Print a title and its findings.

    Wraps lines without rich, which breaks flags at hyphens and pads lines with spaces.
    """
    console.print(Text(title, style="bold"), soft_wrap=True)
    width = max(console.width - _INDENT, 40)
    for finding in findings:
        lines = _wrapped(finding.what, width)
        if finding.do:
            lines += _wrapped(f"-> {finding.do}", width)
        level = Text(f"  {finding.level:<{_INDENT - 2}}", style=_STYLES[finding.level])
        console.print(level.append(lines[0], style="default"), soft_wrap=True)
        for line in lines[1:]:
            console.print(Text(" " * _INDENT + line), soft_wrap=True)
    console.print()


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
