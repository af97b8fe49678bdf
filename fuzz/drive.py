"""Drive one target in this process: `python -m fuzz.drive TARGET [libFuzzer options] DIRS...`.

Needs the extra `fuzz` (atheris). Only our own rooms are instrumented.
"""

from __future__ import annotations

import sys

import atheris

from fuzz.targets import NAMES, load


def main() -> None:
    """Never returns: libFuzzer exits the process, nonzero when it found something."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        sys.exit(f"usage: python -m fuzz.drive {{{','.join(NAMES)}}} [options] [directories]")
    with atheris.instrument_imports(include=["wire", "checkpoint", "syncer", "fuzz.targets"]):
        one_input = load(name)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
