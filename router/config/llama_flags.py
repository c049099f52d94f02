"""The flags of llama-server: which names and variables stand for one, and which take a value.

Read from what `llama-server --help` prints. `llama-server-flags.txt` is that of b11434, without
descriptions; a program at hand may have others.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

# An option begins its line: its names, then what its value looks like, then two spaces.
_OPTION = re.compile(r"(-[\w.-]+(?:,\s+-[\w.-]+)*)(?: (\S.*?))?(?:\s{2,}.*)?")
_INDENT = 39  # of the descriptions (common_arg::to_string, arg.cpp); names may end right before
_REMOVED = "the argument has been removed"
_VARIABLE = re.compile(r"\(env: (\w+)\)")
_HELP_S = 10.0
_FILE = Path(__file__).with_name("llama-server-flags.txt").read_text("utf-8")
_TRUE = frozenset({"true", "on", "enabled", "1", "yes"})
_FALSE = frozenset({"false", "off", "disabled", "0", "no"})


class Flag(Struct, frozen=True):
    """One flag. `value`: what its value looks like; empty: it takes none."""

    names: tuple[str, ...]
    value: str
    variable: str  # of the environment; empty: it has none

    @property
    def name(self) -> str:
        """Return its first long name that does not negate it."""
        return next((n for n in self.names if n[:2] == "--" and not self.negates(n)), self.names[0])

    @property
    def off(self) -> str:
        """Return the name that turns it off; empty: there is none."""
        return next((name for name in self.names[1:] if name.startswith("--no-")), "")

    def negates(self, name: str) -> bool:
        """Return whether a name turns it off."""
        return bool(self.off) and name.lstrip("-").startswith("n")

    def words(self, value: str) -> list[str]:
        """Return the flag with a value as a preset or a variable has it: `true`, `off`, a text."""
        word = value.strip().lower()
        if not self.value:
            if word in _TRUE:
                return [self.name]
            return [self.off] if word in _FALSE and self.off else []
        if "on|off" in self.value and word in _TRUE | _FALSE:
            return [self.name, "on" if word in _TRUE else "off"]
        return [self.name, value]


class Flags:
    """Flags by each of their names and variables."""

    def __init__(self, text: str) -> None:
        """Read a help."""
        self._by_name: dict[str, Flag] = {}
        for flag in _read(text):
            names = (*flag.names, flag.variable) if flag.variable else flag.names
            self._by_name.update(dict.fromkeys(names, flag))

    def name_of(self, word: str) -> str:
        """Return the usual name for a flag such as `-fa`, `--flash-attn=on`; "": it is none."""
        flag = self.of(word)
        if flag is None:
            return ""
        return flag.off if flag.negates(word.partition("=")[0]) else flag.name

    def of(self, word: str) -> Flag | None:
        """Return the flag of a word such as `-fa`, `--flash_attn` or `--flash-attn=on`."""
        name = word.partition("=")[0]
        found = self._by_name.get(name) or self._by_name.get(name.replace("_", "-"))
        return found if word.startswith("-") else None

    def of_key(self, key: str) -> Flag | None:
        """Return the flag of a name without dashes, or of a variable."""
        names = (f"--{key}", f"-{key}", key)
        return next((self._by_name[name] for name in names if name in self._by_name), None)

    def words_of(self, key: str, value: str) -> list[str] | None:
        """Return the words for a key of a preset, or a variable; None: it is no flag's."""
        flag = self.of_key(key)
        if flag is None and key.startswith("LLAMA_ARG_NO_"):
            flag, value = self.of_key(key.replace("_NO_", "_", 1)), "off"
        elif flag is not None and flag.negates(f"--{key}") and value.strip().lower() in _TRUE:
            value = "off"
        elif flag is not None and flag.negates(f"--{key}"):
            value = "on"
        return None if flag is None else flag.words(value)


def flags_of(program: Sequence[str]) -> Flags | None:
    """Return the flags that a program prints; None: it prints none. Runs it, for 10 s at most."""
    found = Flags(_help_of(program))
    return found if found.of("--model") else None


def _help_of(program: Sequence[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - a program that the user named
            [*program, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HELP_S,
            check=False,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout


def _read(text: str) -> Iterator[Flag]:
    found: Flag | None = None
    for line in text.splitlines():
        if _REMOVED in line:
            continue
        option = None if line.startswith("---") else _OPTION.fullmatch(line)
        if option is not None:
            if found is not None:
                yield found
            names = tuple(re.split(r",\s+", option[1]))
            found = Flag(names, "" if option.end(1) == _INDENT else option[2] or "", "")
        elif found is not None and (variable := _VARIABLE.search(line)):
            found = Flag(found.names, found.value, variable[1])
    if found is not None:
        yield found


USUAL = Flags(_FILE)  # those of the file
