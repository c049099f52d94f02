"""The HTTP server: connections, limits, TLS, framing, relay of responses. Knows no routes."""
