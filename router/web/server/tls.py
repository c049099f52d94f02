"""The router's TLS certificate: two files, checked before use and read again later.

Each listening address has one context, and new files are loaded into it. Open connections stay, and
new connections get the new certificate.
"""

import ssl
import stat
from pathlib import Path


class TlsError(Exception):
    """Unusable files; the message begins with the configuration key that names the file."""


def server_context() -> ssl.SSLContext:
    """Return a context for TLS 1.2 and up with OpenSSL's server ciphers, without certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def load(context: ssl.SSLContext, certificate: Path, key: Path) -> str | None:
    """Load a certificate into a context; return the result of `warning` for it. Blocking.

    Raises TlsError and leaves the context as it was: the files are tried on another first.
    """
    problem = warning(certificate, key)
    _load(context, certificate, key)
    return problem


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    for name, path in (("certificate", certificate), ("key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise TlsError(f"tls.{name}: {path} cannot be read: {error.strerror}") from error
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except _EncryptedError:
        raise TlsError(
            f"tls.key: {key} is encrypted; write it without a password (openssl pkey -in KEY -out"
            " PLAIN) and make the result readable by its owner only"
        ) from None
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            message = f"tls.key: {key} is not the key of the certificate {certificate}"
        elif not _has(certificate, b"CERTIFICATE-----"):
            message = f"tls.certificate: {certificate} holds no certificate in PEM form"
        elif not _has(key, b"PRIVATE KEY-----"):
            message = f"tls.key: {key} holds no private key in PEM form"
        else:
            message = f"tls.certificate: cannot be used with tls.key: {error.reason}"
        raise TlsError(message) from error


class _EncryptedError(Exception):
    """Raised when OpenSSL asks for a password."""


def _no_password() -> str:
    raise _EncryptedError


def _has(path: Path, words: bytes) -> bool:
    return b"-----BEGIN" in (text := path.read_bytes()) and words in text


def warning(certificate: Path, key: Path) -> str | None:
    """Return why a client that trusts the issuer would refuse the certificate. Blocking.

    Reasons: expired, not yet valid, not for servers; else warn of a key that all users can read.
    None if all is well. Raises TlsError. Tested by a handshake in memory that trusts only the
    certificate itself.
    """
    server = server_context()
    _load(server, certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (asking, answering, asking):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        return f"tls.certificate: {certificate}: {error.verify_message}"
    mode = stat.S_IMODE(key.stat().st_mode)
    # Access for the group may be intended: a service gets its key that way.
    if mode & stat.S_IROTH:
        return f"tls.key: {key} can be read by all users (mode {mode:o}): chmod o-rwx"
    return None
