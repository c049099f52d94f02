"""Parts of URLs."""

UNIX = "unix:"  # begins the address of a Unix socket: its path follows


def authority(host: str, port: int | None) -> str:
    """Return HOST:PORT as URLs have it: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
