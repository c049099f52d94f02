"""The certificates of this process. A reload reads their files again.

New files are loaded into the contexts in use: open connections stay, new ones get the new
certificate.
"""

import ssl
from functools import partial

import structlog

from router.assembly.backends import StartError, read
from router.base.certificates import end_of
from router.config.schema import Config, TlsConfig
from router.hosts.credentials import Credentials, CredentialsError, renew
from router.web.server import tls

log = structlog.get_logger(__name__)


class Certificates:
    """The contexts, and when their certificates end: for clients (`tls`) and hosts (`fleet`)."""

    def __init__(self, config: Config) -> None:
        self.context = tls.server_context() if config.tls.certificate is not None else None
        self.credentials: Credentials | None = None  # of the fleet, once they are loaded
        self._directory = config.fleet.credentials  # another one needs a restart
        self._ends: dict[str, float] = {}

    @property
    def ends(self) -> dict[str, float]:
        """Return when each certificate ends, in seconds since the epoch."""
        of_fleet = None if self.credentials is None else self.credentials.ends
        return self._ends if of_fleet is None else self._ends | {"fleet": of_fleet}

    async def take(self, config: Config) -> None:
        """Load the files of a configuration. Raises StartError; all stays as it was then."""
        if self.context is not None:
            await read(partial(self._load, self.context, config.tls), "tls: certificate")
        if self.credentials is not None and self._directory is not None:
            try:
                await read(partial(renew, self.credentials, self._directory), "fleet.credentials")
            except CredentialsError as error:
                raise StartError(f"fleet.credentials (--fleet-credentials): {error}") from error

    def _load(self, context: ssl.SSLContext, files: TlsConfig) -> None:
        """Load a certificate into `context`. Blocking. Raises StartError."""
        assert files.certificate is not None
        assert files.key is not None
        try:
            problem = tls.load(context, files.certificate, files.key)
        except tls.TlsError as error:
            raise StartError(str(error)) from error
        if problem is not None:
            log.warning("certificate", problem=problem)
        try:
            self._ends["tls"] = end_of(files.certificate)
        except ValueError as error:  # OpenSSL takes more certificates than x509 reads
            self._ends.pop("tls", None)
            log.warning("certificate_end_unknown", reason=str(error))
