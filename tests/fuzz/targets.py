"""Entries for bytes that this process did not make. Each takes any bytes.

An entry lets out what its callers expect and nothing else: another exception is a bug. Bytes that
an entry takes are used as they are used later, to the last step.
"""

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import xxhash

from router.base import decoding
from router.base.decoding import UndecodableError
from router.base.errors import BackendError, BadRequestError, KvError
from router.base.prefix_hash import split
from router.base.types import OwnPrefill, PrefillProgress
from router.config.loader import ConfigError
from router.config.schema import parse
from router.hosts.messages import Hello, QuoteAsk, QuoteReply
from router.llama import json_offload, listings, replies, trial
from router.llama.answer_counts import AnswerCounts
from router.llama.attach.proofs import NAME as PROOFS
from router.llama.attach.proofs import read_proofs
from router.llama.early_events import EarlyEvents, StreamIdentity
from router.llama.http1 import HttpError, Pool, Response, Target, _Connection
from router.llama.routes import Shape
from router.llama.wire import ParsedRequest, parse_completion, pin_slot, strip_slot
from router.prompts.chat_template import LocalTemplate, _compiled
from router.store import manifests
from router.store.files import manifest_name
from router.store.places.directory import Directory
from router.web.server.content_encodings import ENCODINGS, BrokenEncodingError, Decoding
from tests.support.paths import TEMPLATES

Entry = Callable[[bytes], None]
_LOOP = asyncio.new_event_loop()
_KV = Path(tempfile.mkdtemp(prefix="kvferry-fuzz-"))
_ROUTES = tuple(Shape)
_TEMPLATE = LocalTemplate(
    _compiled((TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text(), "", "<|im_end|>"), ""
)
_DECODERS: tuple[Callable[[bytes], object], ...] = (
    decoding.json_decoder(Hello),
    *(decoding.msgpack_decoder(QuoteAsk), decoding.msgpack_decoder(QuoteReply)),
)


class _Wire:
    """A transport that takes everything."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


def http_answer(raw: bytes) -> None:
    """Take an answer of a server, in two packets."""
    _LOOP.run_until_complete(_answered(raw))


async def _answered(raw: bytes) -> None:
    pool = Pool(Target("127.0.0.1", 9, tls=False), 1.0)
    connection = _Connection(pool)
    connection.connection_made(cast(asyncio.Transport, _Wire()))
    heads: list[Response] = []
    asked = asyncio.ensure_future(  # noqa: TID251 - awaited below
        connection.send("POST", b"", b"", 60.0, heads.append)
    )
    await asyncio.sleep(0)
    half = raw[0] if raw else 0
    for packet in (raw[1:half], raw[half:]):
        if packet and connection.is_open:
            connection.data_received(packet)
    connection.connection_lost(None)
    with suppress(HttpError, BackendError):
        response = await asked
        assert heads, "a response has had its head"
        assert 200 <= response.status < 600
        await response.read()
        response.close()
    await pool.aclose()


def answer(raw: bytes) -> None:
    """Read an answer of a server, and correct the counts of it."""
    shape = _ROUTES[raw[0] % len(_ROUTES)] if raw else Shape.CHAT
    for stream in (False, True):
        replies.read_reply(shape, stream, raw[1:])
    counts = AnswerCounts(shape, OwnPrefill(7, 0.5))
    halves = raw[1 : len(raw) // 2], raw[max(len(raw) // 2, 1) :]
    corrected = b"".join(map(counts.part, halves)) + counts.rest()
    assert corrected == AnswerCounts(shape, OwnPrefill(7, 0.5)).whole(raw[1:])
    events = EarlyEvents(cast(ParsedRequest, _Asked(shape)))
    first = events.progress(PrefillProgress(5, 0, 0.1), 9, StreamIdentity("m", "b"))
    follows = b"".join(map(events.part, halves)) + events.whole(b"")
    assert first
    if b"chatcmpl-" not in raw and b"resp_" not in raw and b"response.created" not in raw:
        assert follows == raw[1:]
    list(replies.progress_in(raw))
    for read in (
        *(replies.props_from, replies.models_from, replies.slots_from, replies.ids_from),
        lambda payload: replies.field_from(payload, "", "content", str),
        *(replies.top_logprobs_from, replies.infill_from),
        lambda payload: replies.transfer_from(payload, "save"),
    ):
        with suppress(BackendError):
            read(raw)
    replies.knows_no_answer(raw)
    replies.error_message_from(raw)
    replies.error_of(raw, 500)
    listings.merge_models([raw, raw])


class _Asked:
    """As much of a parsed request as `EarlyEvents` reads."""

    prompt_source = None

    def __init__(self, shape: Shape) -> None:
        self.shape, self.body = shape, {"return_progress": True, "verbose": True}


def request(raw: bytes) -> None:
    """Take a body of a client: parse, judge, render, and write what the server gets."""
    shape = _ROUTES[raw[0] % len(_ROUTES)] if raw else Shape.CHAT
    body = raw[1:]
    try:
        parsed, _ = parse_completion(shape, body)
    except BadRequestError:
        return
    trial.digest_of(trial.unproven(parsed), shape, "")
    path, tried = trial.request(parsed, "/completion", body, 3)
    assert path.startswith("/")
    sent = [
        tried,
        pin_slot(body, parsed.body, 3, cache_prompt=False),
        strip_slot(body, parsed.body),
    ]
    for made in sent:
        assert isinstance(json_offload.loads(made), dict)
    assert json_offload.loads(sent[1])["id_slot"] == 3
    EarlyEvents(parsed).ping_s  # noqa: B018 - only read


def body(raw: bytes) -> None:
    """Decode a compressed body."""
    if raw:
        decoding = Decoding(ENCODINGS[raw[0] % len(ENCODINGS)], raw[1:])
        with suppress(BrokenEncodingError):
            while decoding.piece():
                pass


def chat(raw: bytes) -> None:
    """Render messages with any content."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return
    messages = [{"role": "user", "content": part} for part in text.split("\x00")]
    rendered = _TEMPLATE.render({"messages": messages})
    assert rendered is None or rendered.startswith("<|im_start|>")


def peer(raw: bytes) -> None:
    """Read a message of another host, or of the directory."""
    for decode in _DECODERS:
        with suppress(UndecodableError):
            found = decode(raw)
            if isinstance(found, QuoteAsk):
                list(split(found.hashes))


def files(raw: bytes) -> None:
    """Find bytes in the small files of a KV directory."""
    (_KV / PROOFS).write_bytes(raw)
    read_proofs(_KV)
    for summed in (raw, raw + xxhash.xxh3_128_digest(raw)):
        name = manifest_name("0" * 32)
        (_KV / name).write_bytes(summed)
        with suppress(KvError):
            manifests.read(Directory(_KV), name)
        (_KV / name).unlink()


def configuration(raw: bytes) -> None:
    """Read a configuration file."""
    with suppress(ConfigError, UnicodeDecodeError):
        parse(raw.decode(), "fuzz")


ENTRIES: dict[str, Entry] = {
    entry.__name__: entry
    for entry in (http_answer, answer, request, body, chat, peer, files, configuration)
}
