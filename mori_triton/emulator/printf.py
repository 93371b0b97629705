"""C's printf for kernels: a format string and its arguments as 64-bit words, formatted by the host's C library.

Source: ROCm's runtime, rocclr/device/devhcprintf.cpp of ROCm/clr, says how the words are read.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Sequence
from typing import Any

# a specifier ends at the first letter of these
_SPECIFIER = re.compile(rb"%(?:(%)|[^diouxXfFeEgGaAcspn]*([diouxXfFeEgGaAcspn]))")
_FLOATS, _INTEGERS = b"fFeEgGaA", b"diouxX"
_POSITION = re.compile(rb"\d+\$")
# flags, width and precision; the size of the argument
_PARTS = re.compile(rb"%([-+ #0']*(?:\*|\d+)?(?:\.(?:\*|\d*))?)(hh?|ll?|[Lqjzt])?[a-zA-Z]")
# most lines are shorter
_LINE_BYTES = 512


@functools.cache
def _snprintf() -> Any:
    function = ctypes.CDLL(None).snprintf
    function.restype = ctypes.c_int
    return function


def _for_host(specifier: bytes, letter: bytes) -> bytes:
    """A specifier that reads what `printf` passes for its letter; empty for what is no specifier of C.

    Only integers keep their size, which says what they are cut to: `%ls` would read wide characters, `%Lf` a long
    double. Positions go, as arguments come in the order of their specifiers.
    """
    found = _PARTS.fullmatch(_POSITION.sub(b"", specifier))
    if found is None:
        return b""
    return b"%" + found[1] + (found[2] or b"" if letter in _INTEGERS else b"") + letter


@functools.lru_cache(maxsize=1024)
def _pieces(form: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """(text before a specifier, the specifier, its letter); a last one without specifier is what follows them.

    Nothing follows a specifier that does not end. What is no specifier of C is text, and then one without effect.
    """
    pieces: list[tuple[bytes, bytes, bytes]] = []
    text, at = b"", 0
    while (start := form.find(b"%", at)) >= 0:
        text += form[at:start]
        found = _SPECIFIER.match(form, start)
        if found is None:
            return [*pieces, (text, b"", b"")]
        at = found.end()
        if found[1]:
            text += b"%%"
        else:
            specifier = _for_host(found[0], found[2])
            if specifier:
                pieces.append((text, specifier, found[2]))
            else:
                pieces.append((text + found[0].replace(b"%", b"%%"), found[0], b"n"))
            text = b""
    return [*pieces, (text + form[at:], b"", b"")]


def _string(data: bytes, word: int) -> bytes:
    """The characters that start at a word, up to a null or the end."""
    end = data.find(b"\0", 8 * word)
    return data[8 * word : end if end >= 0 else len(data)]


def printf(words: Sequence[int]) -> bytes:
    """What C's printf prints.

    words: the format string, padded to whole words, then the arguments: one word for each number, pointer and `*`;
    strings padded like the format. Where arguments are missing the text ends; `%n` has an argument but no effect. What
    is no specifier of C is printed as it is, and has an argument.
    """
    data = struct.pack(f"<{len(words)}Q", *words)
    form = _string(data, 0)
    at, text = len(form) // 8 + 1, b""
    arguments: list[Any] = []
    for before, specifier, letter in _pieces(form):
        text += before
        stars = specifier.count(b"*")
        if not specifier or len(words) - at <= stars:
            break
        if letter == b"n":
            at += stars + 1
            continue
        text += specifier
        arguments += [ctypes.c_int(word & 0xFFFFFFFF) for word in words[at : at + stars]]
        at += stars
        if letter == b"s":
            string = _string(data, at)
            arguments.append(ctypes.c_char_p(string))
            at += len(string) // 8 + 1
            continue
        if letter in _FLOATS:
            arguments.append(ctypes.c_double(*struct.unpack_from("<d", data, 8 * at)))
        else:
            arguments.append(ctypes.c_uint64(words[at]))
        at += 1
    return _format(text, arguments)


def _format(text: bytes, arguments: list[Any]) -> bytes:
    size = _LINE_BYTES
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = _snprintf()(buffer, ctypes.c_size_t(size), text, *arguments)
        if length < size:
            return buffer.raw[: max(length, 0)]
        size = length + 1
