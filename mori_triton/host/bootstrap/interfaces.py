"""Which address of this machine other PEs are told to connect to."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from mori_triton.errors import EnvError

# <linux/sockios.h>, <net/if.h>
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 1, 8
_LOOPBACK = (socket.AF_INET, "127.0.0.1", 0)


def listen_address(names: tuple[str, ...] | None) -> tuple[int, str, int]:
    """(address family, address, scope id) to listen on.

    `names`: interfaces in order of preference (MORI_SOCKET_IFNAME); None: the first that is up and not the loopback,
    else the loopback. Raises `EnvError` when none of the names has an address, listing those there are.
    """
    if names is None:
        candidates = (name for _, name in socket.if_nameindex() if _flags(name) & (_IFF_UP | _IFF_LOOPBACK) == _IFF_UP)
        found = (address for name in candidates if (address := _ipv4(name)) is not None)
        return next(found, _LOOPBACK)
    for name in names:
        address = _ipv4(name) or _ipv6(name)
        if address is not None:
            return address
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise EnvError(
        f"MORI_SOCKET_IFNAME: want an interface with an address (there are {known}), got {','.join(names)!r}"
    )


def _ask(name: str, request: int) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            # no such interface, or it has no address of this kind
            return None


def _flags(name: str) -> int:
    answer = _ask(name, _SIOCGIFFLAGS)
    return 0 if answer is None else struct.unpack_from("<H", answer, 16)[0]


def _ipv4(name: str) -> tuple[int, str, int] | None:
    answer = _ask(name, _SIOCGIFADDR)
    return None if answer is None else (socket.AF_INET, socket.inet_ntoa(answer[20:24]), 0)


def _ipv6(name: str) -> tuple[int, str, int] | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().split("\n")
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) == 6 and words[5] == name:
            return socket.AF_INET6, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])), int(words[1], 16)
    return None
