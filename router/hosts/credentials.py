"""The fleet's credentials: a directory with the authority, this host's certificate, and the secret.

`kvferry fleet certificate` writes them. Peers know each other by certificates of the fleet's own
authority, not by names: the authority signs nothing but hosts of this fleet. TLS 1.3 only.
"""

import ssl
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from router.base.certificates import end_of

AUTHORITY = "authority.pem"
CERTIFICATE = "host.pem"
KEY = "host.key"
SECRET = "secret"  # noqa: S105 - the name of its file

_MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 64  # BLAKE2b takes no longer key


class CredentialsError(Exception):
    """Unusable credentials; the message names the file and the remedy."""


@dataclass(slots=True)
class Credentials:
    """Contexts of both sides (None: plain HTTP), and the secret that keys all prefix hashes.

    `ends`: when the certificate or its authority ends, in seconds since the epoch.
    """

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    secret: bytes
    ends: float | None = None

    @property
    def proof(self) -> str:
        """Return a word that only hosts with this secret know; it tells nothing of the secret."""
        return blake2b(b"kvferry fleet", key=self.secret, digest_size=8).hexdigest()


def load_credentials(directory: Path | None) -> Credentials:
    """Return the credentials in a directory. Blocking. Raises CredentialsError.

    None: plain HTTP, and a secret that is none: for loopback and for tests.
    """
    if directory is None:
        return Credentials(None, None, b"no secret")
    secret = _read(directory / SECRET).strip()
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise CredentialsError(
            f"{directory / SECRET}: must be 16 to 64 bytes long, not {len(secret)}:"
            " `kvferry fleet certificate` makes one"
        )
    server, client = (
        _context(protocol, directory)
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    try:
        ends = min(end_of(directory / name) for name in (CERTIFICATE, AUTHORITY))
    except ValueError as error:
        raise CredentialsError(f"{directory}: a certificate cannot be read: {error}") from error
    return Credentials(server, client, secret, ends)


def renew(credentials: Credentials, directory: Path) -> None:
    """Load the files of a directory into the contexts of credentials. Blocking.

    Raises CredentialsError if they cannot be used, or have another secret; all stays then. An
    authority that the old files had is trusted until the next start.
    """
    new = load_credentials(directory)
    if new.secret != credentials.secret:
        raise CredentialsError(
            f"{directory / SECRET}: is another one than at the start: restart all hosts with it"
        )
    for context in (credentials.server, credentials.client):
        if context is not None:
            _load(context, directory)
    credentials.ends = new.ends


def _context(protocol: int, directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, directory)
    return context


def _load(context: ssl.SSLContext, directory: Path) -> None:
    for name in (AUTHORITY, CERTIFICATE, KEY):
        _read(directory / name)
    try:
        context.load_verify_locations(directory / AUTHORITY)
    except ssl.SSLError as error:
        raise CredentialsError(
            f"{directory / AUTHORITY}: holds no certificate in PEM form"
        ) from error
    try:
        context.load_cert_chain(directory / CERTIFICATE, directory / KEY)
    except ssl.SSLError as error:
        raise CredentialsError(
            f"{directory / CERTIFICATE}: cannot be used with {KEY} ({error.reason}):"
            " `kvferry fleet certificate` makes both"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(
            f"{path}: cannot be read: {error.strerror}; `kvferry fleet certificate` makes it"
        ) from error
