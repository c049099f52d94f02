"""The command line, and the presets of `--case`."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bench.fleet.contenders import URL, Contender, contender, named
from bench.fleet.workload import Sizes

Value = object
_ALL = ("kvferry", "kvferry:cheapest", "nginx", "sglang", "litellm")

# Values of options that neither the case nor the command line sets.
BASE: Mapping[str, Value] = {
    "conversations": 11,
    "turns": 4,
    "groups": 1,
    "system_words": 1_500,
    "system_tokens": None,
    "question_words": 30,
    "answer_tokens": 32,
    "think": 0.0,
    "fan": 1,
    "fans": 0.0,
    "titles": 0.0,
    "interrupted": 0.0,
    "abandoned": 0.0,
    "streams": 0,
    "stream_tokens": 1_000,
    "clients": 3,
    "servers": 2,
    "slots": 2,
    "ram_cache": "off",
}
CASES: Mapping[str, Mapping[str, Value]] = {
    "shared": {},
    "distinct": {"groups": 11},
    "fitting": {"conversations": 4, "turns": 8, "groups": 4, "ram_cache": "on"},
    "nothing": {"conversations": 40, "turns": 1, "groups": 40},
    "burst": {
        "conversations": 1,
        "turns": 1,
        "clients": 1,
        "fan": 16,
        "fans": 1.0,
        "system_tokens": 4_000,
    },
    "streams": {"groups": 11, "clients": 2, "streams": 2},
    "mixed": {
        "groups": 3,
        "think": 0.2,
        "fan": 3,
        "fans": 0.1,
        "titles": 0.7,
        "interrupted": 0.1,
        "abandoned": 0.1,
    },
    "agent": {
        "conversations": 2,
        "turns": 12,
        "groups": 2,
        "system_tokens": 2_000,
        "question_words": 60,
        "clients": 1,
        "servers": 1,
        "slots": 1,
    },
    "trace": {},
}
# kvferry against itself without moves: `streams` measures what the moves cost.
_CONTENDERS = {"streams": ("kvferry", "kvferry:least_busy", "nginx")}
_PARTS = {"off": (False,), "on": (True,), "both": (False, True)}


def parser() -> argparse.ArgumentParser:
    """Return the parser. Options that were not given are None: the case decides."""
    made = argparse.ArgumentParser(
        prog="bench.fleet",
        description="The same clients, one router after the other. `--case` sets other options",
    )
    made.add_argument("--case", choices=list(CASES), default="shared", help="default: shared")
    who = made.add_argument_group("contenders")
    who.add_argument(
        *("--contender", "-c"),
        action="extend",
        type=named,
        metavar="NAME",
        help="kvferry, kvferry:POLICY, kvferry:KEY=VALUE,... (keys of `policy`), both, policies "
        "(kvferry with each), 2*NAME (two, that clients send to in turn), "
        "nginx, sglang, litellm, http://HOST:PORT (any OpenAI-compatible server, as it "
        f"is); repeat it; default: {', '.join(_ALL)}",
    )
    who.add_argument("--model-name", default="any", help="model in each request")
    who.add_argument("--reverse", action="store_true", help="start with the last contender")
    who.add_argument("--runs", type=_count, default=1, help="of each, in alternating order")
    _servers(made)
    _workload(made)
    _trace(made)
    out = made.add_argument_group("output")
    out.add_argument("--plot", type=Path, metavar="FILE", help="PNG or SVG, with matplotlib")
    out.add_argument("--logs", type=Path, metavar="DIR", help="logs and each request as JSON")
    return made


def _servers(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("llama-servers")
    group.add_argument("--model", type=Path, metavar="FILE", help="GGUF; default: the tiny llama")
    group.add_argument("--servers", type=_count)
    group.add_argument("--slots", type=_count, help="of each server")
    group.add_argument("--ctx", type=_count, help="tokens of each slot; default: what is needed")
    group.add_argument("--threads", type=_count, default=1, help="of each server")
    group.add_argument(
        "--ram-cache",
        nargs="?",
        const="on",
        choices=list(_PARTS),
        help="llama-server's own, at its default or off (--cache-ram 0)",
    )


def _workload(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("conversations")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--conversations", type=_count)
    group.add_argument("--turns", type=_count, help="of each conversation")
    group.add_argument("--groups", type=_count, help="system prompts; 1: the same for all")
    group.add_argument("--system-words", type=_count)
    group.add_argument("--system-tokens", type=_count, help="instead of words, about")
    group.add_argument("--question-words", type=_count)
    group.add_argument("--answer-tokens", type=_count, help="max_tokens, length of each answer")
    group.add_argument("--clients", type=_count, help="at a time; each waits for its answer")
    group.add_argument("--think", type=_seconds, metavar="S", help="mean, before each question")
    group.add_argument("--fan", type=_count, help="requests that a fan-out sends at once")
    group.add_argument("--fans", type=_chance, metavar="P", help="chance of a fan-out")
    group.add_argument("--titles", type=_chance, metavar="P", help="chance of a title on the side")
    group.add_argument("--interrupted", type=_chance, metavar="P", help="disconnect in mid-answer")
    group.add_argument("--abandoned", type=_chance, metavar="P", help="disconnect before that")
    group.add_argument("--streams", type=_natural, help="clients that only receive long answers")
    group.add_argument("--stream-tokens", type=_count)
    group.add_argument(
        "--real-answers",
        action="store_true",
        help="go on with the model's answers; prompts then differ between contenders if answers do",
    )


def _trace(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("recorded trace")
    group.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's format")
    group.add_argument("--scale", type=_count, default=64, help="trace tokens for each token sent")
    group.add_argument("--limit", type=_count, default=200, help="requests")
    group.add_argument(
        *("--speed",),
        type=_factor,
        help="open loop, so many times faster than recorded; without it: closed, with --clients",
    )
    group.add_argument("--raw-tokens", action="store_true", help="token arrays instead of text")


def resolve(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in options that were not given. Exits with an error that names the option."""
    if options.trace is not None:
        options.case = "trace"
    elif options.case == "trace":
        made.error("argument --trace: required by --case trace")
    if options.speed is not None and options.trace is None:
        made.error("argument --speed: needs --trace")
    case = CASES[options.case]
    if options.system_words is not None and options.system_tokens is None:
        options.system_tokens = 0  # the given words win over the case's tokens
    for name, value in BASE.items():
        if getattr(options, name) is None:
            setattr(options, name, case.get(name, value))
    if options.contender is None:
        options.contender = [contender(n) for n in _CONTENDERS.get(options.case, _ALL)]
    options.contender = list(dict.fromkeys(options.contender))
    for name in ("model", "trace"):
        path = getattr(options, name)
        if path is not None and not path.is_file():
            made.error(f"argument --{name}: no such file: {path}")
    if options.logs is not None and options.logs.is_dir() and any(options.logs.iterdir()):
        made.error(f"argument --logs: not an empty directory: {options.logs}")
    if options.plot is not None and options.plot.suffix not in (".png", ".svg"):
        made.error(f"argument --plot: must end in .png or .svg: {options.plot.name!r}")


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Return contenders in the order of the first run, once for each RAM cache setting."""
    found = [
        replace(each, ram_cache=ram_cache and each.kind != URL)
        for ram_cache in _PARTS[options.ram_cache]
        for each in options.contender
    ]
    found = list(dict.fromkeys(found))
    return found[::-1] if options.reverse else found


def sizes(options: argparse.Namespace, tokens_per_word: float) -> Sizes:
    """Return the sizes for `workload.build`."""
    system_words = options.system_words
    if options.system_tokens:
        system_words = max(round(options.system_tokens / tokens_per_word), 1)
    return Sizes(
        conversations=options.conversations,
        turns=options.turns,
        groups=options.groups,
        system_words=system_words,
        question_words=options.question_words,
        answer_tokens=options.answer_tokens,
        think_s=options.think,
        fan=options.fan,
        fan_chance=options.fans,
        title_chance=options.titles,
        interrupted_chance=options.interrupted,
        abandoned_chance=options.abandoned,
        streams=options.streams,
        stream_tokens=options.stream_tokens,
    )


def _count(text: str) -> int:
    return _at_least(text, 1)


def _natural(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least}, not {text!r}")
    return value


def _number(text: str, what: str, most: float = float("inf"), *, zero: bool = True) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most or (value == 0.0 and not zero):
        raise argparse.ArgumentTypeError(f"expected {what}, not {text!r}")
    return value


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds")


def _chance(text: str) -> float:
    return _number(text, "a chance from 0 to 1", 1.0)


def _factor(text: str) -> float:
    return _number(text, "a number above 0", zero=False)
