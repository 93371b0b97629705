"""Write the tables of docs/amd_codegen.md, every kernel on every target: `python -m mori_triton.inspect DOCUMENT`."""

from __future__ import annotations

import sys
from pathlib import Path

from mori_triton.device.launch import TARGETS
from mori_triton.inspect import shown
from mori_triton.inspect.kernels import package_launches
from mori_triton.inspect.report import report

if __name__ == "__main__":
    launches = package_launches().values()
    shown.replace_tables(Path(sys.argv[1]), shown.markdown([report(one, arch) for arch in TARGETS for one in launches]))
