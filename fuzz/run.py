"""Run the fuzz targets one after the other: `python -m fuzz.run [--seconds N] [TARGET...]`.

New inputs and failures go to build/fuzz/<target>; a failure's file is named in the output. Exit 1
when a target failed. To keep a failure as a test, copy it to fuzz/corpus/<target>/found-<what>.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys

from fuzz.seeds import CORPUS, ROOT
from fuzz.targets import NAMES

OUTPUT = ROOT / "build" / "fuzz"


def run_target(name: str, seconds: int) -> int:
    """One target for so long; the exit status of its process."""
    found = OUTPUT / name
    found.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fuzz.drive", name, f"-max_total_time={seconds}"]
    command += ["-max_len=4096", "-timeout=10", "-rss_limit_mb=4096", "-print_final_stats=1"]
    command += [f"-artifact_prefix={found}/failed-", str(found), str(CORPUS / name)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.run", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--seconds", type=int, default=60, help="per target (default 60)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.targets) - set(NAMES))
    if unknown or options.seconds < 1:
        parser.error(f"unknown target {unknown[0]}" if unknown else "--seconds must be at least 1")
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: pip install -e '.[fuzz]'", file=sys.stderr)
        return 1
    failed = []
    for name in options.targets or NAMES:
        print(f"== {name}: {options.seconds} s", flush=True)
        if run_target(name, options.seconds):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all targets ran clean", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
