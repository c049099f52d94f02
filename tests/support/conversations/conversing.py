"""Helpers of the end-to-end tests: predicates for `until`, a busy slot, compared answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import Answer, Json, RunningRouter


def all_but_one(answer: Answer) -> bool:
    """Return whether all prompt tokens were cached but the one that is always evaluated."""
    return answer.status == 200 and answer.cached == answer.prompt_tokens - 1


def saved(tokens: int, count: int = 1) -> Callable[[Json], bool]:
    """Return a predicate for `until`: `count` snapshots of at least `tokens` tokens exist."""
    return lambda state: (
        sum(item["tokens"] >= tokens for item in state["snapshots"]["items"]) >= count
    )


def runs_on(backend: str, index: int) -> Callable[[Json], bool]:
    """Return a predicate for `until`: this slot runs a request."""
    return lambda state: any(
        slot["phase"] == "running" and (slot["backend"], slot["index"]) == (backend, index)
        for slot in state["slots"]
    )


async def use_like_any(kvferry: RunningRouter) -> None:
    """Check that prompts are read, and slots saved and restored, however the server is reached."""
    first = await kvferry.complete(ids(1, 600))
    assert first.status == 200, first.body
    await kvferry.until(saved(600))
    await kvferry.complete(ids(2, 600))
    again = await kvferry.complete([*ids(1, 600), *ids(3, 20)])
    assert again.cached >= 590
    assert (await kvferry.chat([{"role": "user", "content": "hello"}])).status == 200


@asynccontextmanager
async def kept_busy(
    kvferry: RunningRouter, prompt: Sequence[int], slot: tuple[str, int], n_predict: int = 1500
) -> AsyncIterator["asyncio.Task[Answer]"]:
    """Keep `slot` busy with a long answer to `prompt`, which still runs when the block ends."""
    body: Json = {"prompt": list(prompt), "n_predict": n_predict, "temperature": 0, "stream": True}
    body |= {"id_slot": slot[1], "n_probs": 5}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.post("/completion", body))
        await kvferry.until(runs_on(*slot))
        yield task
        state = await kvferry.state()
        assert runs_on(*slot)(state), "the long answer ended too early to prove anything"


def reuse(answers: Sequence[Answer]) -> float:
    """Return the share of all prompt tokens that were not computed."""
    return sum(a.cached for a in answers) / sum(a.prompt_tokens for a in answers)


def probabilities(answer: Answer) -> list[Json]:
    """Return id, log probability and rivals of each generated token; ask with `n_probs`."""
    parts = answer.events or [answer.json]
    return [entry for part in parts for entry in part.get("completion_probabilities", [])]


def differs_in_earnest(a: Answer, b: Answer, rounding: float = 0.2) -> str:
    """Return why two greedy answers of /completion differ by more than rounding; "" if not.

    Both must have ended. Without a different token, both must have the same number of tokens, and
    at least one: an empty or truncated answer equals no other.

    The rest of a batch changes the last digits of llama.cpp's sums. A token that was hardly
    preferred may lose to its rival (docs/llama-server.md, "Comparing answers"). At the first
    difference, both answers must therefore give both tokens about the same probability. Later
    tokens cannot be compared.

    On one server, the log probability of the tiny llama's likeliest token varies by up to 0.15. The
    difference depends on where the prefill was interrupted, as the router's own prefills are.
    """
    for name, answer in (("the first", a), ("the second", b)):
        if not _has_ended(answer):
            return f"{name} has no end: {answer.status} {answer.body[-200:]!r}"
    ours, others = probabilities(a), probabilities(b)
    for position, (one, two) in enumerate(zip(ours, others, strict=False)):
        mine = {rival["id"]: rival["logprob"] for rival in one["top_logprobs"]}
        theirs = {rival["id"]: rival["logprob"] for rival in two["top_logprobs"]}
        if abs(one["logprob"] - theirs.get(one["id"], -99.0)) > rounding:
            return f"token {position}: {one} against {two}"
        if one["id"] != two["id"]:
            gap = abs(mine[one["id"]] - mine.get(two["id"], -99.0))
            return "" if gap <= rounding else f"token {position}: {one} against {two}"
    if not ours or len(ours) != len(others):
        return f"{len(ours)} tokens against {len(others)}"
    return ""


def _has_ended(answer: Answer) -> bool:
    """Return whether a plain answer, or the last event of a stream, says that the answer ended."""
    return answer.status == 200 and (answer.events or [answer.json])[-1].get("stop") is True
