"""What the end-to-end tests do with a fleet again and again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from tests.support.servers.router_fleet import Answer, Fleet, Json


def all_but_one(answer: Answer) -> bool:
    """Every token of the prompt was there already, less the one that is always evaluated."""
    return answer.status == 200 and answer.cached == answer.prompt_tokens - 1


def saved(tokens: int, count: int = 1) -> Callable[[Json], bool]:
    """For `until`: `count` snapshots of at least so many tokens are committed."""
    return lambda state: (
        sum(item["tokens"] >= tokens for item in state["snapshots"]["items"]) >= count
    )


def runs_on(backend: str, index: int) -> Callable[[Json], bool]:
    """For `until`: this slot runs a request."""
    return lambda state: any(
        slot["phase"] == "running" and (slot["backend"], slot["index"]) == (backend, index)
        for slot in state["slots"]
    )


@asynccontextmanager
async def kept_busy(
    fleet: Fleet, prompt: Sequence[int], slot: tuple[str, int], n_predict: int = 1500
) -> AsyncIterator["asyncio.Task[Answer]"]:
    """`prompt` is being answered at length on `slot`, and still is at the end of the block."""
    body: Json = {"prompt": list(prompt), "n_predict": n_predict, "temperature": 0, "stream": True}
    body |= {"id_slot": slot[1], "n_probs": 5}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(fleet.post("/completion", body))
        await fleet.until(runs_on(*slot))
        yield task
        state = await fleet.state()
        assert runs_on(*slot)(state), "the long answer ended too early to prove anything"


def reuse(answers: Sequence[Answer]) -> float:
    """Share of all prompt tokens that were not computed."""
    return sum(a.cached for a in answers) / sum(a.prompt_tokens for a in answers)


def probabilities(answer: Answer) -> list[Json]:
    """For each generated token its id, log probability and rivals; ask with `n_probs`."""
    parts = answer.events or [answer.json]
    return [entry for part in parts for entry in part.get("completion_probabilities", [])]


def differs_in_earnest(a: Answer, b: Answer, rounding: float = 0.2) -> str:
    """Why two greedy answers of /completion differ; "" if they do not, but for rounding.

    Both must have ended. Where no token differs, both have as many and some: one that is empty or
    was cut off is nothing like the other.

    What else is in a batch changes llama.cpp's sums in the last digits, and a token that was
    hardly preferred may lose to its rival (docs/llama-server.md, "Comparing answers"). So at the
    first difference both must have given both tokens about the same probability; what follows
    cannot be compared.

    One server alone gives up to 0.15 for the likeliest token of the tiny llama, depending on where
    the computing of a prompt was interrupted, as it is for a prefill of the router's own.
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
    """The last event of a stream says so, and a plain answer."""
    return answer.status == 200 and (answer.events or [answer.json])[-1].get("stop") is True
