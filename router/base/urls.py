"""Parts of URLs."""

UNIX = "unix:"  # begins the address of a Unix socket: its path follows
MOST_OF_A_SOCKET = 107  # bytes of such a path: `sun_path`, less the end (unix(7))


def authority(host: str, port: int | None) -> str:
    """Return HOST:PORT as URLs have it: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
