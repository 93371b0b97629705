"""Find the device bitcode of a target, verify it against `abi`, and specialise it.

The files are checked in under `bitcode/` and ship in the wheel as `mori_triton/_bitcode`. What Triton gets is a copy in
the cache directory, under a directory named by the content's hash: before 3.9 Triton's cache key for AMD kernels has
the path of a library in it, not its content.
"""

from mori_triton.bitcode.files import (
    DEVICE_LIBRARY,
    directory,
    family,
    find_bitcode,
    host_file,
    host_machine,
    labelled_copy,
)
from mori_triton.bitcode.specialisation import answer_provider, provider_here, provider_of, specialize
from mori_triton.bitcode.verification import signatures, verify

__all__ = [
    "DEVICE_LIBRARY",
    "answer_provider",
    "directory",
    "family",
    "find_bitcode",
    "host_file",
    "host_machine",
    "labelled_copy",
    "provider_here",
    "provider_of",
    "signatures",
    "specialize",
    "verify",
]
