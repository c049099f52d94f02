"""`kvferry doctor` over hosts: what is right, and what is said of what is not."""

from pathlib import Path

from router.config.schema import Config
from router.servers.program import free_port
from router.tools.doctor.findings import Level
from router.tools.doctor.hosts import of_hosts
from router.tools.fleet.certificate import make_certificate
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.hosts import fleet_yaml, host
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.running_router import configuration


def config(section: str) -> Config:
    return configuration([("x", "http://127.0.0.1:9")], None, yaml=section)


async def test_a_peer_that_answers_is_named(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    for name in ("h0", "h1"):
        make_certificate(tmp_path / "fleet", name)
    sections = [fleet_yaml(at, ports, credentials=tmp_path / "fleet") for at in (0, 1)]
    async with FakeLlama(kv_dir=tmp_path) as fake, host(0, [fake], sections[0]):
        found = await of_hosts(config(sections[1]), [])

    told = [(finding.level, finding.what) for finding in found]
    assert told[0][0] is Level.OK
    assert "h0" in told[0][1]
    assert "2 slots" in told[0][1]
    assert told[1][0] is Level.WARNING  # the host itself, which does not run


async def test_another_secret_and_other_tenants_are_said(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    for name in ("h0", "h1"):
        make_certificate(tmp_path / "fleet", name)
    (tmp_path / "fleet" / "h1" / "secret").write_text("x" * 20)
    sections = [fleet_yaml(at, ports, credentials=tmp_path / "fleet") for at in (0, 1)]
    async with FakeLlama(kv_dir=tmp_path) as fake, host(0, [fake], sections[0]):
        (finding, _) = await of_hosts(config(sections[1]), [])

    assert finding.level is Level.ERROR
    assert "another fleet secret" in finding.what


async def test_the_directory_is_examined(tmp_path: Path) -> None:
    async with RedisServer.started(tmp_path) as server:
        section = fleet_yaml(0, [free_port()], redis=server.url)
        (fine,) = await of_hosts(config(section), [])
        await server.kill()
        (gone,) = await of_hosts(config(section), [])

    assert (fine.level, gone.level) == (Level.OK, Level.WARNING)
    assert "version" in fine.what
    assert "does not answer" in gone.what


async def test_without_a_fleet_nothing_is_said() -> None:
    assert await of_hosts(config(""), []) == []


async def test_missing_credentials_are_named(tmp_path: Path) -> None:
    section = fleet_yaml(0, [free_port()], credentials=tmp_path)
    (finding,) = await of_hosts(config(section), [])

    assert finding.level is Level.ERROR
    assert "fleet.credentials" in finding.what
