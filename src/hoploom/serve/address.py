"""host:port, read and written, and whether it is free."""

import ipaddress
import socket
from collections.abc import Iterable

from hoploom.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT, or [HOST]:PORT for IPv6."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the address is {address!r:.100}; give HOST:PORT, e.g. 127.0.0.1:7000")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of split_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this host reaches an address. A name other than localhost is not looked up: it may change."""
    bare = host.strip("[]").partition("%")[0].lower().rstrip(".")
    if bare == "localhost":
        return True
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return False
    inner = getattr(address, "ipv4_mapped", None)
    return bool((inner or address).is_loopback)


def check_free(host: str, port: int) -> None:
    """Raise ConfigError where nobody could listen: gRPC itself would share a port that is taken, in silence."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}; give another address") from error
    if not is_loopback(host) and all(is_loopback(str(one[4][0])) for one in found):
        raise ConfigError(
            f"{host} is {found[0][4][0]} on this host (/etc/hosts may say so), which no other host reaches; give the "
            "address that others reach it by, or 127.0.0.1 where none is to"
        )


def read_addresses(servers: str | Iterable[str]) -> list[str]:
    """The addresses in a list, or in a text with commas; each once."""
    listed = servers.split(",") if isinstance(servers, str) else list(servers)
    found = [join_address(*split_address(one.strip())) for one in listed if isinstance(one, str) and one.strip()]
    if not found or len(found) != len([one for one in listed if one != ""]):
        raise ConfigError(f"servers are {servers!r:.200}; give addresses, e.g. 10.0.0.1:7000,10.0.0.2:7000")
    return list(dict.fromkeys(found))
