"""Findings about certificates that end soon."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from router.base.certificates import WARN_BEFORE_S, end_of
from router.base.clock import wall_now
from router.config.schema import Config
from router.tools.doctor.findings import Finding, Level


async def of_certificates(config: Config) -> list[Finding]:
    """Return a finding for each certificate that ends within 30 days, or has ended."""
    found: list[Finding] = []
    if config.tls.certificate is not None:
        found += await _of("tls.certificate", config.tls.certificate, "renew it")
    if config.fleet.credentials is not None:
        for name, do in (
            ("host.pem", "kvferry fleet certificate NAME --renew"),
            ("authority.pem", "make a new fleet: certificates of all hosts end with it"),
        ):
            found += await _of("fleet.credentials", config.fleet.credentials / name, do)
    return found


async def _of(key: str, path: Path, do: str) -> list[Finding]:
    try:
        ends = await asyncio.to_thread(end_of, path)
    except (OSError, ValueError):
        return []  # said elsewhere
    left_s = ends - wall_now()
    if left_s > WARN_BEFORE_S:
        return []
    day = datetime.fromtimestamp(ends, UTC).date()
    if left_s <= 0:
        return [Level.ERROR(f"{key}: {path} ended on {day}", f"{do}, then reload")]
    told = f"{key}: {path} ends on {day}, in {left_s / 86400:.0f} days"
    return [Level.WARNING(told, f"{do}, then reload")]
