"""`python -m bench.hints`: reuse of a document by its next question, marked or not.

The client marks the end of the document with `cache_control`. Each row has a llama-server and a
router of its own, with one slot: a tiny model of each kind of memory.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import rig
from bench.client import Client, Json
from bench.conversation import Conversation, words
from bench.report import Report, arguments_of, run_bench
from tests.support.models.tiny_models import KINDS, tiny_model

COLUMNS = ("memory", "marked", "tokens", "computed", "reused")
MEMORY = dict(zip(KINDS, ("full attention", "sliding window", "hybrid", "recurrent"), strict=True))
_MARK: Json = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.hints", description=__doc__)
    parser.add_argument("--words", type=int, default=2000, help="of the document")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Ask two questions about a document, for each kind with a mark and without."""
    report = Report("hints", "Marks of clients", list(COLUMNS), arguments_of(options))
    for kind in options.kinds.split(","):
        for marked in (False, True):
            with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
                home = Path(folder)
                model = tiny_model(kind).path
                async with (
                    rig.llama(
                        slots=1, ctx_per_slot=16384, kv_dir=home / "kv", model=model
                    ) as server,
                    rig.kvferry("kvferry", [server.url], home, kv_dir=home / "kv") as proxy,
                ):
                    usage = await asyncio.to_thread(_second, proxy.url, options.words, marked)
            reused = usage["cache_read_input_tokens"]
            tokens = usage["input_tokens"] + reused
            report.add(
                MEMORY[kind], "yes" if marked else "no", tokens, tokens - reused, reused / tokens
            )
    return report


def _second(url: str, n_words: int, marked: bool) -> dict[str, int]:
    """Return the usage of the second question about a document."""
    client = Client(url)
    document, *questions = (
        words(Conversation(n).random, n_words if not n else 20) for n in range(3)
    )
    usage: dict[str, int] = {}
    for question in questions:
        end: Json = _MARK if marked else {}
        parts: list[Any] = [{"type": "text", "text": document, **end}]
        parts.append({"type": "text", "text": question})
        body = {"max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
        usage = client.post("/v1/messages", body).json()["usage"]
    client.close()
    return usage


if __name__ == "__main__":
    sys.exit(main())
