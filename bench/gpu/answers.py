"""`python -m bench.gpu.answers`: answers after a restore on another server against cold ones.

kvferry computes a prompt on one server, drains it, and gets a longer prompt, which it then serves
on the other one. Beside it what the server alone does: the same prompt cold again, and in two
requests. These differ from a cold one by rounding, since batches have other sizes.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import rig
from bench.client import Client, Json, until
from bench.conversation import prompt_of
from bench.report import Report, arguments_of, run_bench
from tests.support.servers.llama_server import LlamaServer

COLUMNS = (
    *("model", "KV", "way", "prompt", "computed", "of 32 tokens equal", "logprob differs by"),
)
_KV_TYPES = ("f16", "q8_0")
_MORE = 64  # tokens that the longer prompt has
_ANSWER = 32
_MARGIN = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.gpu.answers", description=__doc__)
    parser.add_argument("--model", type=Path, action="append", required=True, help="repeatable")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt that is saved")
    parser.add_argument("--threads", type=int, default=1)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Compare the answers of each model, with each type of KV."""
    report = Report("answers", "Answers after a restore", list(COLUMNS), arguments_of(options))
    for model in options.model:
        for kv in _KV_TYPES:
            with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as home:
                for cells in await _compared(model, kv, Path(home), options):
                    report.add(model.stem, kv, *cells)
    report.notes.append(
        "against the same prompt computed cold in one request; differs: of the first token's three"
        " likeliest, at most, in nats; another prompt: a control, which has to differ"
    )
    return report


async def _compared(
    model: Path, kv: str, home: Path, options: argparse.Namespace
) -> list[tuple[str, int, int, int, float | None]]:
    per_slot = options.tokens + _MORE + _ANSWER + _MARGIN
    servers = [
        LlamaServer(
            model,
            slots=2,
            ctx=2 * per_slot,
            kv_dir=home / "kv",
            threads=options.threads,
            extra_args=("-ctk", kv, "-ctv", kv, "-fa", "on"),
        )
        for _ in range(2)
    ]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        urls = [server.url for server in servers]
        cold, direct = await asyncio.to_thread(_directly, urls[1], options.tokens)
        way = rig.kvferry("kvferry", urls, home, kv_dir=home / "kv")
        async with way as router:
            restored = await asyncio.to_thread(_restored, router.url, urls[1], options.tokens)
        ways = direct | {"restored by kvferry": restored}
        return [(name, *cells) for name, cells in _cells(cold, ways)]
    finally:
        for server in servers:
            await server.stop()


def _prompts(client: Client, n_tokens: int) -> tuple[list[int], list[int]]:
    """Return a prompt and a longer one that begins with it."""
    longer = prompt_of(client, n_tokens + _MORE, 1)
    return longer[:n_tokens], longer


def _directly(url: str, n_tokens: int) -> tuple[Json, dict[str, Json]]:
    client = Client(url)
    prompt, longer = _prompts(client, n_tokens)
    cold = _answer(client, longer, 0)
    again = _answer(client, longer, 1)
    client.post("/slots/1?action=erase", {})
    client.post("/completion", {"prompt": prompt, "n_predict": 0, "id_slot": 1})
    pieces = _answer(client, longer, 1)
    other = _answer(client, [*reversed(prompt), *longer[n_tokens:]], 0)
    for slot in (0, 1):  # kvferry reads what slots hold when it starts
        client.post(f"/slots/{slot}?action=erase", {})
    client.close()
    return cold, {"cold again": again, "in two requests": pieces, "another prompt": other}


def _restored(url: str, backend: str, n_tokens: int) -> Json:
    """Return the answer on a server that never saw the prompt, when the other one is drained."""
    client, counter = Client(url), Client(backend)
    prompt, longer = _prompts(counter, n_tokens)
    _answer(client, prompt, None)
    held = max(_state(client)["slots"], key=lambda slot: int(slot["resident_tokens"] or 0))
    client.post(f"/kvferry/backends/{held['backend']}/drain", {})
    until(lambda: any(each["state"] == "drained" for each in _state(client)["backends"]))
    answer = _answer(client, longer, None)
    client.close()
    counter.close()
    return answer


def _state(client: Client) -> Json:
    return client.get("/kvferry/state").json()


def _answer(client: Client, prompt: list[int], slot: int | None) -> Json:
    body: Json = {"prompt": prompt, "n_predict": _ANSWER, "n_probs": 3, "temperature": 0}
    body |= {"return_tokens": True, "ignore_eos": True}
    return client.post("/completion", body | ({} if slot is None else {"id_slot": slot})).json()


def _cells(
    cold: Json, ways: Mapping[str, Json]
) -> Iterator[tuple[str, tuple[int, int, int, float | None]]]:
    for name, answer in ways.items():
        timings = answer["timings"]
        prompt = timings["cache_n"] + timings["prompt_n"]
        pairs = zip(cold["tokens"], answer["tokens"], strict=False)
        equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        yield name, (prompt, timings["prompt_n"], equal, _difference(cold, answer))


def _difference(cold: Json, answer: Json) -> float | None:
    """Return how much the first token's likeliest differ at most; None: they are others."""
    first, second = (
        {
            token["id"]: token["logprob"]
            for token in one["completion_probabilities"][0]["top_logprobs"]
        }
        for one in (cold, answer)
    )
    common = first.keys() & second.keys()
    return max(abs(first[id_] - second[id_]) for id_ in common) if common else None


if __name__ == "__main__":
    sys.exit(main())
