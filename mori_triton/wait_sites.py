"""Names of the places in kernels that wait, by the tag that an error record carries.

A tag is a constant in device code, so it has to be the same in every process and import order: `register_wait_site`
derives it from the name alone. Negative tags are the device library's own (`abi.TAG_*`).
"""

from __future__ import annotations

import zlib

from mori_triton.errors import ArgumentError

_names: dict[int, str] = {
    0: "a wait without a name",
    -1: "barrier_all",
    -2: "wait_until",
    -3: "a queue pair",
}
# small tags are left to people who number their waits by hand; device code keeps a tag in an i32
_FIRST_DERIVED = 1 << 16


def register_wait_site(name: str) -> int:
    """The tag of the wait called `name` (for example "dispatch.wait"), the same in every process; asking again is fine.

    Kernels take it as a constexpr. Raises `ArgumentError` when two names share a tag: rename one.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"name: want a text, got {name!r}")
    tag = _FIRST_DERIVED + zlib.crc32(name.encode()) % (2**31 - _FIRST_DERIVED)
    known = _names.setdefault(tag, name)
    if known != name:
        raise ArgumentError(f"name: {name!r} has the tag of {known!r} ({tag}); choose another name")
    return tag


def wait_site_name(tag: int) -> str:
    """What `tag` was registered as, or "wait site <tag>"."""
    return _names.get(tag, f"wait site {tag}")
