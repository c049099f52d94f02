"""Make what the hosts of a fleet know each other by: an authority, certificates, a secret.

The first call makes the authority and the secret in a directory; each call makes the certificate of
one host below it, as the directory that `--fleet-credentials` takes.
"""

import datetime
import os
import secrets
import shutil
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from router.base.errors import RouterError
from router.hosts.credentials import AUTHORITY, CERTIFICATE, KEY, SECRET

AUTHORITY_KEY = "authority.key"  # stays where certificates are made
_AUTHORITY_DAYS, _HOST_DAYS = 3650, 825
_SECRET_BYTES = 24  # 48 letters; the file may have 16 to 64


class CertificateError(RouterError):
    """The certificate cannot be made; the message says why."""


def make_certificate(directory: Path, host: str, *, renew: bool = False) -> Path:
    """Return the new directory of a host's credentials. Blocking. Raises CertificateError.

    An existing one is kept unless `renew`: the host may be using it.
    """
    own = directory / host
    if own.exists() and not renew:
        raise CertificateError(f"{own} exists; --renew replaces its certificate")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, authority = _authority(directory)
    secret = directory / SECRET
    if not secret.exists():
        _write(secret, secrets.token_hex(_SECRET_BYTES).encode() + b"\n")
    own.mkdir(mode=0o700, exist_ok=True)
    host_key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(host, authority.subject, host_key.public_key(), _HOST_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"kvferry:host:{host}")]),
            critical=False,
        )
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    _write(own / KEY, _pem(host_key))
    _write(own / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))
    for name in (AUTHORITY, SECRET):
        shutil.copyfile(directory / name, own / name)
        (own / name).chmod(0o600)
    return own


def _authority(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the fleet's authority; made if there is none."""
    key_file, file = directory / AUTHORITY_KEY, directory / AUTHORITY
    if key_file.exists() and file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{key_file} is not a key that kvferry made")
        return key, x509.load_pem_x509_certificate(file.read_bytes())
    if file.exists():
        raise CertificateError(
            f"{directory} has {AUTHORITY} and not {AUTHORITY_KEY}: make certificates where the"
            " first one was made"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvferry fleet authority")])
    certificate = (
        _builder("kvferry fleet authority", name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, _pem(key))
    _write(file, certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Hosts' clocks may differ: a new certificate is valid on one that is a day behind.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
