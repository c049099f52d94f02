"""A bucket as other people have it: keys and address, slow lines, old stores."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from router.base.errors import KvError
from router.base.tasks import spawn
from router.servers.program import free_port
from router.store.places import bucket
from router.store.places.bucket import Bucket
from tests.support.servers.s3_server import BUCKET, S3_KEYS, S3Server

pytestmark = pytest.mark.thorough

UNUSED = "http://127.0.0.1:9"
URL = f"s3://{BUCKET}/kv"


@pytest.fixture
async def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[S3Server]:
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    async with S3Server.started() as server:
        yield server


def set_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)


async def round_trip(url: str, endpoint: str | None = None) -> bytes:
    made = await asyncio.to_thread(Bucket, url, endpoint)
    await asyncio.to_thread(made.put, "states/x", b"content")
    return await asyncio.to_thread(made.get, "states/x")


@pytest.mark.parametrize("place", ["environment", "profile", "services"])
async def test_keys_and_endpoint_from_where_other_programs_take_them(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    if place != "environment":
        (tmp_path / ".aws").mkdir()
        facts = f"region = eu-west-1\nendpoint_url = {s3.endpoint}\n"
        if place == "services":
            nested = f"ec2 =\n  endpoint_url = {UNUSED}\ns3 =\n  endpoint_url = {s3.endpoint}\n"
            facts = f"endpoint_url = {UNUSED}\nservices = lab\n[services lab]\n{nested}"
        (tmp_path / ".aws/config").write_text(f"[profile kv]\n{facts}")
        keys = "aws_access_key_id = test\naws_secret_access_key = test\n"
        (tmp_path / ".aws/credentials").write_text(f"[kv]\n{keys}")
        monkeypatch.setenv("AWS_PROFILE", "kv")
    else:
        set_keys(monkeypatch)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    assert await round_trip(URL) == b"content"


async def test_unknown_profile_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "gone")
    with pytest.raises(KvError, match="no profile 'gone'"):
        await round_trip(URL, s3.endpoint)


async def test_upload_slower_than_the_silence(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line takes longer for the object as a store may be silent."""
    set_keys(monkeypatch)
    direct = await asyncio.to_thread(Bucket, URL, s3.endpoint)
    monkeypatch.setattr(bucket, "_SILENT", timedelta(seconds=2))
    port, content = free_port(), os.urandom(6 << 20)
    line = await asyncio.start_server(
        lambda reader, writer: forward(reader, writer, s3.port, len(content) / 5), "127.0.0.1", port
    )
    async with line:
        made = await asyncio.to_thread(Bucket, URL, f"http://127.0.0.1:{port}")
        await asyncio.to_thread(made.put, "states/slow", content)
    assert await asyncio.to_thread(direct.get, "states/slow") == content


async def forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, bytes_per_s: float
) -> None:
    """Forward a connection; what the client sends, at this rate."""
    there, back = await asyncio.open_connection("127.0.0.1", port)

    async def up() -> None:
        while chunk := await reader.read(1 << 16):
            back.write(chunk)
            await back.drain()
            await asyncio.sleep(len(chunk) / bytes_per_s)  # the line's speed
        back.write_eof()

    async def down() -> None:
        while chunk := await there.read(1 << 16):
            writer.write(chunk)
            await writer.drain()

    sending = spawn(up(), name="upload")
    try:
        await down()
    finally:
        sending.cancel()
        writer.close()
        back.close()


async def test_store_without_deletion_in_bulk(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys(monkeypatch)
    made = await asyncio.to_thread(Bucket, URL, s3.endpoint)
    names = [f"states/{number}" for number in range(3)]
    for name in names:
        await asyncio.to_thread(made.put, name, b"x")
    real = made._obstore.delete

    def without_bulk(store: object, paths: object) -> None:
        if store is made._store:
            raise OSError("501 Not Implemented")
        real(store, paths)

    monkeypatch.setattr(made._obstore, "delete", without_bulk)
    await asyncio.to_thread(made.delete, [*names, "states/never"])
    assert await asyncio.to_thread(made.listing, "states/") == []
