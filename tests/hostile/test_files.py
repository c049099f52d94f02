"""Files that damage, hang or are full: service goes on, and the process ends when it is told to."""

import os
import signal
import sqlite3
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import configuration_text
from tests.tools.test_cli import serving

pytestmark = pytest.mark.hostile


async def test_a_configuration_that_hangs_does_not_keep_the_process(
    llama_server: StartServer, tmp_path: Path
) -> None:
    """A reload reads a FIFO that nobody writes, as a mount that hangs; then SIGTERM comes."""
    server, path = await llama_server(), tmp_path / "kvferry.yaml"
    text = configuration_text([("a", server.url)], None, yaml="listen: 127.0.0.1:0")
    path.write_text(text)
    async with serving("--config", str(path)) as process:
        url = (await process.event("listening"))["url"]
        await process.event("backend_up")
        path.unlink()
        os.mkfifo(path)
        process.send(signal.SIGHUP)
        await process.event("reload_failed")
        async with aiohttp.ClientSession() as session:
            body = {"prompt": ids(1, 40), "n_predict": 1}
            async with session.post(f"{url}/completion", json=body) as response:
                assert response.status == 200
        assert await process.end(signal.SIGTERM) == 0


async def test_a_vocabulary_that_never_comes_stops_nothing(
    llama_server: StartServer, tmp_path: Path
) -> None:
    server, path, pipe = await llama_server(), tmp_path / "kvferry.yaml", tmp_path / "t.gguf"
    os.mkfifo(pipe)
    yaml = f"listen: 127.0.0.1:0\ntokenizer: {{mode: local, path: {pipe}}}"
    path.write_text(configuration_text([("a", server.url)], None, yaml=yaml))
    async with serving("--config", str(path)) as process:
        assert (await process.event("local_tokenizer_not_used"))["reason"] == "is no regular file"
        await process.event("backend_up")
        assert await process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("spoil", ["damaged", "directory", "locked"])
async def test_a_book_of_usage_that_cannot_be_used_stops_nothing(
    llama_server: StartServer, tmp_path: Path, spoil: str
) -> None:
    server, path = await llama_server(), tmp_path / "kvferry.yaml"
    book = tmp_path / "usage.sqlite"
    holder = None
    match spoil:
        case "directory":
            book.mkdir()
        case "locked":
            holder = sqlite3.connect(book)
            holder.execute("BEGIN EXCLUSIVE")
        case _:
            book.write_bytes(b"SQLite format 3\0" + os.urandom(5000))
    yaml = f"listen: 127.0.0.1:0\nusage: {{file: {book}}}"
    path.write_text(configuration_text([("a", server.url)], None, yaml=yaml))
    async with serving("--config", str(path)) as process:
        assert (await process.event("usage_not_written"))["reason"]
        url = (await process.event("listening"))["url"]
        await process.event("backend_up")
        async with aiohttp.ClientSession() as session:
            body = {"prompt": ids(1, 40), "n_predict": 1}
            async with session.post(f"{url}/completion", json=body) as response:
                assert response.status == 200
            async with session.get(f"{url}/kvferry/usage") as response:
                told = await response.json()
        assert told["usage"][0]["requests"] == 1
        assert told["problem"]
    if holder is not None:
        holder.close()
