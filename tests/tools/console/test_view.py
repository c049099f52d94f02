"""The picture fits the terminal, and no fact in it is only a colour."""

from typing import Any

import pytest
from rich.console import Console

from router.tools.console.rates import Recent
from router.tools.console.view import View, picture

Json = dict[str, Any]
RATES = {"prefill_tokens_per_s": 3210.4, "output_tokens_per_s": 55.5}
NOTHING = Recent(0, 0, 0, 0, 0, None, None)
BUSY = Recent(1200, 3, 39_000, 53_000, 8_000, 0.082, 1.5)


def backend(name: str, **more: Any) -> Json:
    known = {"name": name, "up": True, "slots": 2, "n_ctx": 8192, "memory_kind": "full"}
    return known | {"rates": RATES, "problem": None, "note": None, "snapshots": True} | more


def slot(name: str, index: int, phase: str = "idle", held: int = 0, **more: Any) -> Json:
    known = {"backend": name, "index": index, "phase": phase, "resident_tokens": held}
    return known | {"request": None, "idle_s": None} | more


def state(backends: list[Json] = [], slots: list[Json] = [], **more: Any) -> Json:  # noqa: B006
    store = {"count": 0, "size_bytes": 0, "tokens": 0, "evicted": 0}
    store |= {"max_bytes": -1, "max_tokens": -1}
    known: Json = {"policy": "prefer_idle_slot_with_global_restore", "queue": []}
    known |= {"waiting_for_backend": 0, "snapshots": store}
    return known | {"backends": backends, "slots": slots} | more


def drawn(
    what: Json,
    width: int = 80,
    height: int | None = None,
    recent: Recent = NOTHING,
    decisions: list[Json] | None = None,
    since_s: float | None = 60.2,
) -> str:
    view = View("http://127.0.0.1:8080", what, recent, since_s, decisions or [], "12:34:56")
    console = Console(width=width, force_terminal=False, color_system=None, record=True)
    with console.capture() as captured:
        console.print(picture(view, width, height))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    return "\n".join(line.rstrip() for line in lines)


SIX = [
    slot("gpu0", 0, "running", 4096, request="00c0ffee00c0ffee"),
    slot("gpu0", 1, "idle", 8192, idle_s=75.0),
    slot("gpu1", 0, "lost"),
]
DECISION = {
    "id": "r",
    "time": "2026-01-02T03:04:05.678+00:00",
    "backend": "gpu0",
    "slot": 1,
    "source": "snapshot",
    "reason": "snapshot is cheapest at 0.009s",
    "outcome": "ok",
    "prompt_tokens": 12_345,
    "planned_tokens": 12_000,
    "cached_tokens": 11_999,
    "ttft_s": 0.0454,
}
REJECTED = dict.fromkeys(DECISION) | {
    "time": "2026-01-02T03:04:05+00:00",
    "outcome": "queue_full",
    "reason": "1024 requests wait already",
}


@pytest.mark.parametrize("width", [80, 140])
def test_everything_is_there(width: int) -> None:
    queue = [{"request": "q", "waited_s": 2.5, "prompt_tokens": 7}]
    store = {"count": 123, "size_bytes": 8 * 2**30, "tokens": 1_000_000, "evicted": 4}
    store |= {"max_bytes": 32 * 2**30, "max_tokens": 2_000_000}
    backends = [backend("gpu0"), backend("gpu1", up=False, problem="the backend hangs")]
    what = state(backends, SIX, queue=queue, waiting_for_backend=2, snapshots=store)
    text = " ".join(drawn(what, width, recent=BUSY, decisions=[DECISION, REJECTED]).split())

    for said in (
        "http://127.0.0.1:8080 12:34:56",
        "last 60 s 1,200 requests (3 failed); TTFT 82ms (median), 1.50s (95%)",
        "reuse 92% of 100,000 prompt tokens; 39% resident; 53% snapshot",
        "queue 3 waiting, for up to 2.50s",
        "123; ███░░░ 50%; 8.00GiB of 32.0GiB; 1,000,000 of 2,000,000 tokens",
        "down",
        "the backend hangs",
        "3,210",
        "gpu0/0 running 4,096 of 8,192 ████████░░░░░░░░ 00c0ffee00c0ffee",
        "gpu0/1 idle 8,192 of 8,192 ████████████████ idle for 1m15s",
        "gpu1/0 lost",
        "12,345",
        "12,000",
        "11,999",
        "45ms",
        "queue_full",
    ):
        assert said in text
    assert ("snapshot is cheapest at 0.009s" in text) == (width == 140)
    assert ("1024 requests wait already" in text) == (width == 140)


@pytest.mark.parametrize("width", [80, 140])
def test_an_empty_fleet(width: int) -> None:
    """All backends are down since the start: no slot is known."""
    down = backend("gpu0", up=False, problem="the backend cannot be reached")
    text = drawn(state([down]), width, since_s=None)

    assert "since start  0 requests" in text
    assert "no prompt yet" in text
    assert "none waiting" in text
    assert "cannot be" in text
    assert "resident of" not in text


def test_a_store_without_limits_has_no_share_of_them() -> None:
    (line,) = [line for line in drawn(state()).splitlines() if line.startswith("snapshots")]

    assert line == "snapshots    0; 0B; 0 tokens; 0 evicted"


def test_what_blobs_spare_and_lack() -> None:
    blobs = {"size_bytes": 2**30, "sum_bytes": 20 * 2**30, "written_bytes": 2 * 2**30}
    good = blobs | {"unwritten": 0, "budget_left_bytes": None, "damaged": 0}
    bad = blobs | {"unwritten": 3, "budget_left_bytes": 0, "damaged": 1}
    for row, said in (
        (good, ""),
        (bad, "; 3 not split yet; no more may be written today; 1 damaged"),
    ):
        what = state()
        what["snapshots"]["blobs"] = row
        (line,) = [line for line in drawn(what, 140).splitlines() if line.startswith("blobs")]
        assert line == f"blobs        1.00GiB for 20.0GiB of files; 2.00GiB written{said}"


def test_what_a_backend_lacks_is_said() -> None:
    text = drawn(state([backend("a", snapshots=False), backend("b", note="cuts are refused")]))

    assert "no snapshots" in text
    assert "cuts are refused" in text


def test_progress_of_a_prompt_is_shown() -> None:
    working = slot("a", 0, "preparing", 100, request="00c0ffee00c0ffee", prefilled=0.42)
    assert "00c0ffee00c0ffee  42%" in drawn(state([backend("a")], [working]))


def test_what_a_router_says_beyond_that_is_shown_as_it_is() -> None:
    """A newer router may know more states of a backend or phases of a slot."""
    gone = backend("a", up=False, state="drained", problem=None)
    text = drawn(state([gone, backend("b", state="draining")], [slot("b", 0, "odd", 1)]))

    assert [line.split()[:2] for line in text.splitlines() if line[:2] in ("a ", "b ")] == [
        ["a", "drained"],
        ["b", "draining"],
    ]
    assert "b/0 odd 1 of 8,192" in " ".join(text.split())


def test_servers_on_demand_are_shown_loaded_or_not() -> None:
    servers = [
        {"name": "chat", "phase": "up", "waiting": 0},
        {"name": "code", "phase": "stopped", "waiting": 2},
    ]
    assert "chat up; code stopped (2 waiting)" in drawn(state(servers=servers))


def test_many_slots_take_a_line_for_each_backend() -> None:
    """Eight backends with sixteen slots fit a terminal of 34 lines, decisions included."""
    names = [f"gpu{n}" for n in range(8)]
    slots = [
        slot(name, n, "running" if n < 4 else "idle", 8192 * n // 15)
        for name in names
        for n in range(16)
    ]
    what = state([backend(name, slots=16) for name in names], slots)
    text = drawn(what, 80, 34, decisions=[DECISION] * 20)

    assert len(text.splitlines()) == 34
    assert "gpu7   ·▁▂▂▃▃▄▄▅▅▆▆▇▇██  4 running, 12 idle" in text
    assert text.count("12,345") == 4
    assert "gpu7/15" in drawn(what, 80)  # with room each slot has a line


def test_decisions_take_what_is_left() -> None:
    what = state([backend("gpu0")], SIX[:2])

    assert drawn(what, 80, 22, decisions=[DECISION] * 20).count("12,345") == 5
    assert "12,345" not in drawn(what, 80, 14, decisions=[DECISION] * 20)
    assert drawn(what, 80, decisions=[DECISION] * 20).count("12,345") == 20
