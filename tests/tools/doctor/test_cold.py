"""`kvferry doctor` and `serve` over a cold tier: what is wrong with it, in words and a remedy."""

from math import inf
from pathlib import Path

import pytest

from router.assembly.backends import StartError
from router.assembly.router import build
from router.base.clock import wall_now
from router.config.loader import ConfigError
from router.config.schema import parse
from router.store.blobs.split_snapshots import FOLDER
from router.store.blobs.write_budget import WriteBudget
from router.tools.doctor.cold import of_cold
from router.tools.doctor.command import doctor
from router.tools.doctor.disk import of_disks
from router.tools.doctor.findings import Level
from tests.support.servers.running_router import configuration
from tests.support.servers.s3_server import S3_KEYS, S3Server

BACKENDS = "backends: [{url: 'http://127.0.0.1:9'}]\n"


async def found(cold: str) -> list[tuple[Level, str]]:
    config = configuration([("x", "http://127.0.0.1:9")], None, yaml=f"cold: {cold}")
    return [(one.level, one.what) for one in await of_cold(config)]


async def test_without_a_cold_tier_nothing_is_said() -> None:
    assert await found("{after: 1h}") == []


async def test_a_directory_that_works(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir(mode=0o700)
    (first, second) = await found(f"'{tmp_path}/cold'")

    assert first[0] is Level.OK
    assert f"{tmp_path}/cold: 0 states" in first[1]
    assert second == (Level.NOTE, "nothing there is encrypted: who reads it reads the prompts")


async def test_a_bucket_that_works_and_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    key = tmp_path / "key"
    key.write_text("k" * 40)
    async with S3Server.started() as server:
        (fine, rules) = await found(f"{{{server.yaml}, key_file: '{key}'}}")
        (gone,) = await found(f"{{url: 's3://others/kv', endpoint: '{server.endpoint}'}}")

    assert fine[0] is Level.OK
    assert (rules[0], "rules for" in rules[1]) == (Level.NOTE, True)
    assert gone[0] is Level.ERROR
    assert gone[1].endswith("there is no such bucket: create it, or correct the URL")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("short", "must have 32 to 1024 bytes, not 5: `openssl rand"),
        (None, "No such file or directory"),
    ],
)
async def test_a_key_file_that_cannot_be_used(tmp_path: Path, key: str | None, why: str) -> None:
    path = tmp_path / "key"
    if key is not None:
        path.write_text(key)
    cold = f"{{url: '{tmp_path}/cold', key_file: '{path}'}}"
    ((level, what),) = await found(cold)
    assert level is Level.ERROR
    assert "cold.key_file" in what
    assert why in what
    with pytest.raises(StartError, match=r"cold\.key_file"):
        async with build(parse(f"{BACKENDS}cold: {cold}", "test")):
            pass


async def test_a_directory_that_is_not_there_holds_up_no_start(tmp_path: Path) -> None:
    """It may be mounted later: the log and the doctor say what is missing."""
    ((level, what),) = await found(f"'{tmp_path}/cold'")
    assert level is Level.ERROR
    assert f"{tmp_path}/cold is no directory: create it, or mount what it is in" in what
    async with build(parse(f"{BACKENDS}cold: '{tmp_path}/cold'", "test")) as router:
        assert router.cold is not None
        assert not router.cold.is_usable


@pytest.mark.parametrize(
    ("cold", "why"),
    [
        ("bucket/x", "cold.url: must be s3://BUCKET/PREFIX"),
        ("'s3://'", "cold.url: must be s3://BUCKET/PREFIX"),
        ("'s3://key:secret@bucket'", "keys come from the environment"),
        ("'s3://bucket?x=1'", "keys come from the environment"),
        ("{url: /c, endpoint: 'http://127.0.0.1:9'}", "cold.endpoint: is for `url: s3://"),
        ("{url: 's3://b', endpoint: 'http://minio:9000'}", "cold.endpoint: is http, which can be"),
        ("{url: /c}\nstore: {blobs: /c/blobs}", "cold.url: overlaps with /c/blobs"),
        ("{url: /c/d}\nstore: {blobs: /c}", "cold.url: overlaps with /c"),
        ("{url: /c, keep: 0}", "cold.keep: must be more than 0"),
    ],
)
def test_what_cannot_be_is_refused(cold: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"{BACKENDS}cold: {cold}", "test")
    assert why in str(caught.value)
    assert "key:secret" not in str(caught.value)


def test_http_is_allowed_where_everything_is_sealed_or_local() -> None:
    for cold in (
        "{url: 's3://b', endpoint: 'http://minio:9000', key_file: /k}",
        "{url: 's3://b', endpoint: 'http://127.0.0.1:9000'}",
        "{url: 's3://b', endpoint: 'https://minio:9000'}",
    ):
        assert parse(f"{BACKENDS}cold: {cold}", "test").cold.url == "s3://b"


async def test_what_was_written_today_is_told(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    config = configuration([("x", "http://127.0.0.1:9")], tmp_path)
    assert of_disks(config) == []
    budget = WriteBudget(inf, wall_now)
    budget.spend(5 << 20, 3 << 20)
    budget.write(tmp_path / FOLDER)
    (found,) = of_disks(config)
    assert (found.level, found.what.split(": ")[1]) == (
        Level.OK,
        "5.00MiB written in 24 hours, 3.00MiB of it for new tokens",
    )
    budget.spend(200 << 30)
    budget.write(tmp_path / FOLDER)
    assert of_disks(config)[0].level is Level.WARNING


async def test_a_tier_that_cannot_be_used_is_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that asks before a start sees nothing else."""
    config = configuration([("x", "http://127.0.0.1:9")], None, yaml=f"cold: '{tmp_path}/none'")
    assert await doctor(config) == 1
    assert "Not ready: the cold tier cannot be used" in capsys.readouterr().out
