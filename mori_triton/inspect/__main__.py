"""Write the tables of docs/amd_codegen.md, every kernel on every target: `python -m mori_triton.inspect DOCUMENT`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mori_triton.device.launch import TARGETS
from mori_triton.errors import MoriError
from mori_triton.inspect import shown
from mori_triton.inspect.kernels import package_launches
from mori_triton.inspect.report import report


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Compiling takes minutes, so the document is looked at first."""
    parser = argparse.ArgumentParser(prog="python -m mori_triton.inspect", description=__doc__)
    parser.add_argument("document", type=Path, help="a Markdown file that has the markers of the tables")
    document: Path = parser.parse_args(arguments).document
    try:
        shown.replace_tables(document, _tables)
    except (MoriError, OSError) as error:
        parser.error(str(error))


def _tables() -> str:
    launches = package_launches().values()
    return shown.markdown([report(one, arch) for arch in TARGETS for one in launches])


if __name__ == "__main__":
    main()
