"""`kvferry fleet certificate`: the files, and that hosts accept each other with them."""

import ssl
from pathlib import Path

import pytest

from router.hosts.credentials import CredentialsError, load_credentials
from router.tools.cli import main
from router.tools.fleet.certificate import CertificateError, make_certificate


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Return the version that two contexts agree on. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (asking, answering, asking, answering):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return answering.version()


def test_two_hosts_accept_each_other(tmp_path: Path) -> None:
    one, other = (load_credentials(make_certificate(tmp_path, name)) for name in ("a", "b"))
    assert one.server is not None
    assert other.client is not None

    assert handshake(one.server, other.client) == "TLSv1.3"
    assert one.secret == other.secret
    assert one.proof == other.proof


def test_only_the_owner_reads_them(tmp_path: Path) -> None:
    make_certificate(tmp_path / "fleet", "a")
    found = [path for path in (tmp_path / "fleet").rglob("*") if path.is_file()]

    assert len(found) == 7
    assert all(path.stat().st_mode & 0o077 == 0 for path in found)


def test_an_existing_one_is_replaced_only_on_demand(tmp_path: Path) -> None:
    before = (make_certificate(tmp_path, "a") / "host.pem").read_bytes()
    with pytest.raises(CertificateError, match="--renew"):
        make_certificate(tmp_path, "a")

    assert (make_certificate(tmp_path, "a", renew=True) / "host.pem").read_bytes() != before


def test_without_its_key_the_authority_makes_nothing(tmp_path: Path) -> None:
    make_certificate(tmp_path, "a")
    (tmp_path / "authority.key").unlink()

    with pytest.raises(CertificateError, match=r"authority\.key"):
        make_certificate(tmp_path, "b")


def test_the_command_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "certificate", "box-a", "--directory", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"The credentials of box-a are in {tmp_path}/box-a" in told
    assert "--fleet-credentials" in told

    assert main(["fleet", "certificate", "box a", "--directory", str(tmp_path)]) == 2
    assert "box a" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["authority.pem", "host.pem", "host.key", "secret"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    own = make_certificate(tmp_path, "a")
    (own / name).unlink()

    with pytest.raises(CredentialsError, match=name):
        load_credentials(own)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "a")
    (own / "secret").write_text("short")

    with pytest.raises(CredentialsError, match="16 to 64"):
        load_credentials(own)
