"""The man page has every command and every option of the parser."""

import re

from tests.tools.man_page import PAGE, man_page

_OPTION = re.compile(r"--[a-z][a-z-]+")
_COMMAND = re.compile(r"kvferry\\fR \\fI\\,([a-z]+)")


def named(page: str) -> tuple[set[str], set[str]]:
    """Return options and commands; the layout is that of a Python version."""
    return set(_OPTION.findall(page.replace("\\-", "-"))), set(_COMMAND.findall(page))


def test_page_is_that_of_the_parser() -> None:
    """If not: `python -m tests.tools.man_page`."""
    assert named(PAGE.read_text()) == named(man_page())
    options, commands = named(PAGE.read_text())
    assert {"--backend", "--listen", "--config"} <= options
    assert {"serve", "doctor", "snapshots", "warm"} <= commands
