"""TLS with certificates from files: errors in files are reported; renewed files are reloaded."""

import asyncio
import os
import ssl
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from router.assembly.backends import StartError
from router.tools.console.client import CallError, connected
from router.tools.doctor.check import check_text
from router.web.server import tls
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import configuration_text, running


@pytest.fixture(autouse=True)
def blocking_calls_fail() -> None:
    """These functions block: the router calls them in a thread or at its start."""


NO_TENANT = [("a", "http://127.0.0.1:9")]


@dataclass
class Files:
    """A certificate and its key, in files that may be rewritten."""

    certificate: Path
    key: Path
    ca: trustme.CA

    @property
    def yaml(self) -> str:
        return f"tls: {{certificate: {self.certificate}, key: {self.key}}}"

    def renew(self, *, expired: bool = False) -> None:
        """Write another certificate, with another key."""
        until = datetime.now(UTC) - timedelta(days=1) if expired else None
        since = datetime.now(UTC) - timedelta(days=9) if expired else None
        made = self.ca.issue_cert("127.0.0.1", not_before=since, not_after=until)
        self.key.touch(0o600)
        self.key.write_bytes(made.private_key_pem.bytes())
        self.certificate.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path / "router.pem", tmp_path / "router.key", trustme.CA())
    made.renew()
    return made


def encrypt(key: Path) -> None:
    found = load_pem_private_key(key.read_bytes(), None)
    encryption = BestAvailableEncryption(b"secret")
    key.write_bytes(found.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))


async def handshake(
    url: str, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Connect over TLS; return the streams and the certificate that the server showed."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return reader, writer, shown


async def asks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send a request that keeps the connection open; return the status of the answer."""
    writer.write(b"GET /kvferry/health HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"}}")
    return head.split()[1]


async def test_a_client_that_trusts_the_issuer(files: Files) -> None:
    """Both addresses use TLS: operators' tokens travel over the second."""
    yaml = files.yaml + "\nadmin: {listen: '127.0.0.1:0'}"
    async with running(NO_TENANT, None, yaml=yaml, wait_for=[]) as kvferry:
        assert kvferry.url.startswith("https://")
        assert kvferry.router.admin_url is not None
        for url in (kvferry.url, kvferry.router.admin_url):
            async with kvferry.session.get(url + "/kvferry/health", ssl=files.client()) as response:
                assert "status" in await response.json()
        with pytest.raises(ssl.SSLCertVerificationError):
            await handshake(kvferry.url, ssl.create_default_context())


async def test_what_a_command_says_that_speaks_otherwise(files: Files) -> None:
    """Regression: an unknown issuer was reported as "Operation not permitted"."""
    async with (
        running(NO_TENANT, None, yaml=files.yaml, wait_for=[]) as kvferry,
        FakeLlama() as plain,
    ):
        for url, why in (
            (kvferry.url, "its certificate is not accepted: .*SSL_CERT_FILE=FILE"),
            (kvferry.url.replace("https:", "http:"), r"closed the connection; is it https://\?"),
            (plain.url.replace("http:", "https:"), r"does not accept TLS here, .*; try http://"),
        ):
            async with connected(url) as router:
                with pytest.raises(CallError, match=why):
                    await router.state()


async def test_old_versions_are_refused(files: Files) -> None:
    assert tls.server_context().minimum_version is ssl.TLSVersion.TLSv1_2
    async with running(NO_TENANT, None, yaml=files.yaml, wait_for=[]) as kvferry:
        for version, works in (
            (ssl.TLSVersion.TLSv1_1, False),
            (ssl.TLSVersion.TLSv1_2, True),
            (ssl.TLSVersion.TLSv1_3, True),
        ):
            client = files.client()
            with nullcontext() if works else pytest.warns(DeprecationWarning, match="TLSv1_1"):
                client.minimum_version = client.maximum_version = version
            client.set_ciphers("ALL:@SECLEVEL=0")
            try:
                _, writer, _ = await handshake(kvferry.url, client)
                writer.close()
                assert works
            except (ssl.SSLError, ConnectionError):
                assert not works


async def test_plain_http_on_the_port_of_tls(files: Files) -> None:
    """The client gets no answer, and the next client is served."""
    async with running(NO_TENANT, None, yaml=files.yaml, wait_for=[]) as kvferry:
        port = int(kvferry.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        reader, writer, _ = await handshake(kvferry.url, files.client())
        assert await asks(reader, writer) == b"503"
        writer.close()


async def test_a_handshake_that_is_never_finished(files: Files) -> None:
    yaml = files.yaml + "\nlimits: {header_timeout: 300ms}"
    async with running(NO_TENANT, None, yaml=yaml, wait_for=[]) as kvferry:
        port = int(kvferry.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01")
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


async def test_a_renewed_certificate(files: Files, tmp_path: Path) -> None:
    """After a reload new connections get the new certificate, and old connections go on.

    The reload may also name other files.
    """
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text(NO_TENANT, None, yaml=files.yaml))
    async with running(NO_TENANT, None, yaml=files.yaml, wait_for=[], path=path) as kvferry:
        reader, writer, first = await handshake(kvferry.url, files.client())
        files.renew()
        _, other, still = await handshake(kvferry.url, files.client())
        other.close()
        await kvferry.router.reload()
        _, other, renewed = await handshake(kvferry.url, files.client())
        other.close()
        moved = Files(tmp_path / "moved.pem", tmp_path / "moved.key", files.ca)
        moved.renew()
        path.write_text(configuration_text(NO_TENANT, None, yaml=moved.yaml))
        told = await kvferry.router.reload()
        _, other, elsewhere = await handshake(kvferry.url, files.client())
        other.close()

        assert await asks(reader, writer) == b"503"
        writer.close()
    assert first == still
    assert len({first, renewed, elsewhere}) == 3
    assert {change["key"] for change in told["changed"]} == {"tls.certificate", "tls.key"}  # type: ignore[attr-defined]
    assert told["needs_restart"] == []


async def test_a_reload_with_files_that_do_not_fit(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text(NO_TENANT, None, yaml=files.yaml))
    async with running(NO_TENANT, None, yaml=files.yaml, wait_for=[], path=path) as kvferry:
        _, writer, before = await handshake(kvferry.url, files.client())
        writer.close()
        key = files.key.read_bytes()
        files.renew()
        files.key.write_bytes(key)
        with pytest.raises(Exception, match=r"tls\.key: .* is not the key of"):
            await kvferry.router.reload()
        _, writer, after = await handshake(kvferry.url, files.client())
        writer.close()

    assert before == after


async def test_tls_is_not_switched_on_by_a_reload(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text(NO_TENANT, None, yaml=files.yaml))
    async with running(NO_TENANT, None, wait_for=[], path=path) as kvferry:
        told = await kvferry.router.reload()
        assert (await kvferry.get("/kvferry/health")).status == 503

    assert {change["key"] for change in told["needs_restart"]} == {"tls.certificate", "tls.key"}  # type: ignore[attr-defined]


# --- files that cannot be used --------------------------------------------------------------------


def _gone(files: Files) -> None:
    files.key.unlink()


def _no_certificate(files: Files) -> None:
    files.certificate.write_text("hello")


def _no_key(files: Files) -> None:
    files.key.write_text("hello")


def _swapped(files: Files) -> None:
    certificate = files.certificate.read_bytes()
    files.certificate.write_bytes(files.key.read_bytes())
    files.key.write_bytes(certificate)


def _of_another(files: Files) -> None:
    certificate = files.certificate.read_bytes()
    files.renew()
    files.certificate.write_bytes(certificate)


def _encrypted(files: Files) -> None:
    encrypt(files.key)


def _cut(files: Files) -> None:
    files.certificate.write_bytes(files.certificate.read_bytes()[:300])


def _folder(files: Files) -> None:
    files.certificate.unlink()
    files.certificate.mkdir()


BAD = {
    "gone": (_gone, "tls.key", "No such file"),
    "a folder": (_folder, "tls.certificate", "Is a directory"),
    "no certificate": (_no_certificate, "tls.certificate", "no certificate in PEM form"),
    "no key": (_no_key, "tls.key", "no private key in PEM form"),
    "swapped": (_swapped, "tls.certificate", "no certificate in PEM form"),
    "of another": (_of_another, "tls.key", "is not the key of"),
    "encrypted": (_encrypted, "tls.key", "is encrypted"),
    "cut": (_cut, "tls.certificate", ""),
}


@pytest.mark.parametrize("name", BAD)
async def test_files_that_cannot_be_used(files: Files, tmp_path: Path, name: str) -> None:
    """`kvferry check` and the start report the same error; no part of a key is repeated."""
    break_, key, words = BAD[name]
    break_(files)
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text(NO_TENANT, None, yaml=files.yaml))

    code, text = check_text(path)
    assert code == 2
    name = key.removeprefix("tls.")
    lines = path.read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.strip().startswith(f"{name}:"))
    assert text.startswith(f"{path}:{line}: {key}: ")
    assert words in text
    assert "PRIVATE" not in text
    with pytest.raises(StartError) as refused:
        async with running(NO_TENANT, None, yaml=files.yaml, wait_for=[]):
            pass
    assert f"{path}:{line}: {refused.value}" == text


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_key_that_is_not_ours_to_read(files: Files) -> None:
    files.key.chmod(0)
    with pytest.raises(tls.TlsError, match=r"^tls\.key: .* cannot be read: Permission denied"):
        tls.load(tls.server_context(), files.certificate, files.key)


async def test_an_expired_certificate_is_used_with_a_warning(files: Files, tmp_path: Path) -> None:
    """An expired certificate is better than no service; monitoring reports it, too."""
    files.renew(expired=True)
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text(NO_TENANT, None, yaml=files.yaml))

    code, text = check_text(path)
    assert code == 0
    assert text.endswith(f"Warning: tls.certificate: {files.certificate}: certificate has expired.")
    with structlog.testing.capture_logs() as log:
        async with running(NO_TENANT, None, yaml=files.yaml, wait_for=[]) as kvferry:
            assert kvferry.url.startswith("https://")
    assert [entry["log_level"] for entry in log if "has expired" in str(entry)] == ["warning"]


def test_a_key_that_everybody_reads_is_told(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text(NO_TENANT, None, yaml=files.yaml))
    for mode, warned in ((0o644, True), (0o640, False), (0o600, False)):
        files.key.chmod(mode)
        code, text = check_text(path)
        assert (code, "can be read by all users (mode 644)" in text) == (0, warned)


def test_a_good_one_has_none(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text(NO_TENANT, None, yaml=files.yaml))

    assert tls.warning(files.certificate, files.key) is None
    code, text = check_text(path)
    assert (code, "Warning" in text, "(TLS)" in text) == (0, False, True)
