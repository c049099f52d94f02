"""Certificates of the fleet: when they end is told, and a reload takes new ones."""

import asyncio
import ssl
from pathlib import Path

import pytest

from router.base.clock import wall_now
from router.hosts.credentials import load_credentials
from router.servers.program import free_port
from router.tools.doctor.certificates import of_certificates
from router.tools.doctor.findings import Level
from router.tools.fleet.certificate import make_certificate
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.hosts import fleet_yaml, host
from tests.support.servers.running_router import configuration, configuration_text

DAYS = "router.tools.fleet.certificate._HOST_DAYS"
DAY_S = 86400
END = 'kvferry_certificate_end_timestamp_seconds{certificate="fleet"}'


async def shown(port: int, credentials: Path) -> bytes:
    """Return the certificate that a host shows to a new connection of another host."""
    context = load_credentials(credentials).client
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = found.getpeercert(binary_form=True)
    writer.close()
    assert certificate is not None
    return certificate


async def test_a_reload_takes_a_new_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports, fleet_dir = [free_port(), free_port()], tmp_path / "fleet"
    make_certificate(fleet_dir, "h0")
    monkeypatch.setattr(DAYS, 20)
    make_certificate(fleet_dir, "h0", renew=True)
    other = make_certificate(fleet_dir, "h1")
    section, path = fleet_yaml(0, ports, credentials=fleet_dir), tmp_path / "kvferry.yaml"
    async with FakeLlama(kv_dir=tmp_path) as fake:
        path.write_text(configuration_text([("h0-0", fake.url)], tmp_path, yaml=section))
        async with host(0, [fake], section, path=path) as kvferry:
            before, ends = await shown(ports[0], other), (await kvferry.metrics())[END]
            monkeypatch.setattr(DAYS, 400)
            make_certificate(fleet_dir, "h0", renew=True)
            assert await shown(ports[0], other) == before
            await kvferry.router.reload()
            after, then = await shown(ports[0], other), (await kvferry.metrics())[END]

            (fleet_dir / "h0" / "host.pem").write_text("no certificate")
            with pytest.raises(Exception, match=r"host\.pem"):
                await kvferry.router.reload()
            assert await shown(ports[0], other) == after
    assert after != before
    assert ends == pytest.approx(wall_now() + 20 * DAY_S, abs=DAY_S)
    assert then == pytest.approx(wall_now() + 400 * DAY_S, abs=DAY_S)


@pytest.mark.parametrize(
    ("days", "level", "told"),
    [(29, Level.WARNING, "ends on"), (31, None, ""), (-1, Level.ERROR, "ended on")],
)
async def test_the_doctor_names_what_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, level: Level | None, told: str
) -> None:
    monkeypatch.setattr(DAYS, days + 0.5)
    make_certificate(tmp_path / "fleet", "h0")
    section = fleet_yaml(0, [free_port()], credentials=tmp_path / "fleet")
    found = await of_certificates(configuration([("x", "http://127.0.0.1:9")], None, yaml=section))
    assert [finding.level for finding in found] == ([] if level is None else [level])
    assert all(told in finding.what and "--renew" in finding.do for finding in found)
