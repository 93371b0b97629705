"""Names of the places in kernels that wait, by the tag that an error record carries.

A tag is a constant in device code, so it has to be the same in every process and import order: the fixed sites are listed
here, and `register_wait_site` derives a tag from the name alone. Imports nothing of the package but errors.
"""

from __future__ import annotations

import zlib

from mori_triton.errors import ArgumentError

UNNAMED = 0
BARRIER_ALL = 1
WAIT_UNTIL = 2  # MORI's `*_wait_until_*` names

_names: dict[int, str] = {
    UNNAMED: "a wait without a name",
    BARRIER_ALL: "barrier_all",
    WAIT_UNTIL: "wait_until",
}
# tags below are fixed ones; device code keeps the tag in an i32
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
