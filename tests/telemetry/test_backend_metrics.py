"""Metrics of all backends in one answer, whatever some of them answer."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from router.base.errors import BackendError
from router.base.types import BackendId
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.telemetry import backend_metrics
from router.telemetry.backend_metrics import BackendMetrics, parse

# Metrics as llama-server writes them.
GOOD = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 637
# HELP llamacpp:n_tokens_max Largest observed n_tokens.
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 280
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 0
"""
UP = "kvferry_backend_scrape_up"
Samples = dict[tuple[str, str], float]


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[str]:
    """Answer every connection with these bytes and close it; None: never answer."""
    over: list[asyncio.Future[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over.append(ended := asyncio.get_running_loop().create_future())
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            if answer is not None:
                writer.write(answer)
            else:
                await reader.read()
            writer.close()
            await writer.wait_closed()
        ended.set_result(None)

    made = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
    finally:
        made.close()
        await asyncio.gather(*over)


async def scrape(
    answers: Mapping[str, bytes | None], registry: CollectorRegistry | None = None
) -> Samples:
    """Scrape backends that answer so, once; return (sample, backend) to value."""
    async with AsyncExitStack() as stack:
        urls = {
            name: await stack.enter_async_context(server(answer))
            for name, answer in answers.items()
        }
        connections = await stack.enter_async_context(Connections())
        clients = {
            BackendId(name): LlamaClient(BackendId(name), url, connections, Timeouts(health_s=0.2))
            for name, url in urls.items()
        }
        text = await BackendMetrics(clients, registry or CollectorRegistry()).text()
    return {
        (sample.name, sample.labels["backend"]): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_names_stay_as_the_backend_gave_them() -> None:
    """llama-server has a counter without `_total`, which the library's parser appends to every
    counter."""
    async with server(http(GOOD)) as url, Connections() as connections:
        client = LlamaClient(BackendId("a"), url, connections, Timeouts())
        text = await BackendMetrics({client.id: client}, CollectorRegistry()).text()

    lines = text.decode().splitlines()
    assert 'llamacpp:n_tokens_max{backend="a"} 280.0' in lines
    assert "# TYPE llamacpp:prompt_tokens_total counter" in lines
    assert sum(line.startswith("# TYPE llamacpp:prompt_tokens") for line in lines) == 1


BROKEN: dict[str, bytes | None] = {
    "silent": None,
    "closed at once": b"",
    "not HTTP": b"noise\r\n\r\n",
    "refused": http(b"", "501 Not Implemented"),
    "nothing in it": http(b""),
    "a page": http(b"<html>Welcome</html>"),
    "no text": http(b"\xff\xfe"),
    "an odd space": http("# TYPE \xa0 counter".encode()),
    "a family of ours": http(b"# TYPE ours_total counter\nours_total 7\n"),
    "a sample of ours": http(b"ours_total 7\n"),
    "the sample about it": http(b"kvferry_backend_scrape_up 1\n"),
    "too long": http(b"x 1\n" * 100_000),
    "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + GOOD,
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
async def test_one_that_fails_is_left_out_and_told_so(answer: bytes | None) -> None:
    registry = CollectorRegistry()
    Counter("ours", "A metric of the router's", registry=registry)
    found = await scrape({"a": answer, "b": http(GOOD)}, registry)

    assert (found[UP, "a"], found[UP, "b"]) == (0, 1)
    assert {backend for name, backend in found if name != UP} == {"b"}


async def test_where_two_differ_about_a_type_the_first_one_holds() -> None:
    """Versions of llama-server may differ, but one family has one type."""
    other = GOOD.replace(b"requests_processing gauge", b"requests_processing counter")
    found = await scrape({"a": http(GOOD), "b": http(other)})

    assert ("llamacpp:requests_processing", "a") in found
    assert ("llamacpp:requests_processing", "b") not in found
    assert found[UP, "b"] == 1


async def test_a_label_of_their_own_gives_way() -> None:
    async with server(http(b'x{backend="cuda"} 1\n')) as url, Connections() as connections:
        client = LlamaClient(BackendId("a"), url, connections, Timeouts())
        text = await BackendMetrics({client.id: client}, CollectorRegistry()).text()

    assert b'x{backend="a",exported_backend="cuda"} 1.0' in text


@given(st.one_of(st.binary(max_size=60), st.text('#{}"\\=, \n\xa0TYPEHL_a1').map(str.encode)))
def test_garbage_raises_nothing_else(text: bytes) -> None:
    with suppress(ValueError):
        parse(text)


COUNTS = """# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {prompt}
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total {seconds}
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total {calls}
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode {busy}
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max {most}
"""


class Told:
    """A client whose server tells these metrics."""

    def __init__(self, name: str, **values: float) -> None:
        self.id = BackendId(name)
        self.values = values

    async def metrics(self) -> bytes:
        if not self.values:
            raise BackendError("it has ended")
        return COUNTS.format(**self.values).encode()


async def summed(metrics: BackendMetrics) -> dict[str, float]:
    text = (await metrics.sums(3, 2)).decode()
    families = text_string_to_metric_families(text)
    return {s.name.removeprefix("llamacpp:"): s.value for f in families for s in f.samples}


async def test_servers_are_summed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters go on when a process ends, and when it begins anew."""
    clock = 10.0
    monkeypatch.setattr(backend_metrics, "monotonic", lambda: clock)
    a = Told("a", prompt=100, seconds=2, calls=10, busy=1, most=50)
    b = Told("b", prompt=300, seconds=2, calls=30, busy=3, most=70)
    clients = {a.id: a, b.id: b}
    metrics = BackendMetrics(clients, CollectorRegistry())  # type: ignore[arg-type]
    first = await summed(metrics)
    assert (first["prompt_tokens_total"], first["n_tokens_max"]) == (400, 70)
    assert (first["n_busy_slots_per_decode"], first["prompt_tokens_seconds"]) == (2.5, 100)
    assert (first["requests_processing"], first["requests_deferred"]) == (3, 2)
    assert first["tokens_predicted_total"] == 0  # there, though no server tells it: no empty panel

    del clients[b.id]
    a.values |= {"prompt": 40, "seconds": 1, "calls": 1}  # restarted
    clock = 20.0
    second = await summed(metrics)
    assert (second["prompt_tokens_total"], second["prompt_tokens_seconds"]) == (440, 40)
    assert second["n_tokens_max"] == 70
    a.values = {}
    assert (await summed(metrics))["prompt_tokens_total"] == 440  # as it told last
