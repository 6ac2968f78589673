"""Protection of a server for this machine alone. A page of another site may send a browser here under its own name, so
requests that ask for another host are refused; and no page may be framed, sniffed or cached."""

LOOPBACK = "127.0.0.1"
HOSTS = frozenset({LOOPBACK, "localhost", "[::1]"})  # as a browser may call us, with any port: a tunnel has its own


def host_of(header: str | None) -> str:
    name, colon, port = (header or "").lower().rpartition(":")
    return name if colon and port.isdigit() else (header or "").lower()


def headers(policy: str) -> dict[str, str]:
    """Of every answer; `policy` says what a page may load."""
    return {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
