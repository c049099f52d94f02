"""The end of a certificate."""

from pathlib import Path

WARN_BEFORE_S = 30 * 86400.0


def end_of(path: Path) -> float:
    """Return when the first certificate of a PEM file ends, in seconds since the epoch. Blocking.

    Raises OSError and ValueError.
    """
    try:
        from cryptography import x509  # 60 ms, for those that have a certificate
    except ModuleNotFoundError as error:
        raise ValueError("to read it needs `pip install 'kvferry[fleet]'`") from error

    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
