"""The import table of the project (CONTRIBUTING.md), read from the syntax trees.

Rooms may import only the rooms and libraries named here; the pure cores touch no socket, clock,
thread, process or file, which is what lets the same code run on a wire, in a property test, and
in a simulation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("wire", "checkpoint", "syncer", "learner", "benchmarks", "fuzz")
AROUND = {"benchmarks", "fuzz"}  # programs around the product: any room, any library

# room -> the other rooms it may import
MAY_IMPORT_ROOMS = {
    "wire": set(),
    "checkpoint": {"wire"},
    "syncer": {"wire", "checkpoint"},
    "learner": {"wire", "checkpoint"},
    "benchmarks": {"wire", "checkpoint", "syncer", "learner"},
    "fuzz": {"wire", "checkpoint", "syncer", "learner"},
}

# room -> the libraries it may import beside the standard library
MAY_IMPORT_LIBRARIES = {
    "wire": {"numpy", "numba", "torch", "uvloop", "cryptography", "click"},
    "checkpoint": {"numpy", "numba", "llvmlite", "torch", "safetensors", "click", "rich"},
    "syncer": {"numpy", "torch", "safetensors", "click", "rich", "uvloop"},
    "learner": {"numpy", "torch", "safetensors", "msgpack", "click", "rich", "uvloop"},
}

# Within a room these libraries are for these modules only.
ONLY_IN = {
    "wire": {
        "torch": {"wire.tensors"},
        "numba": {"wire.compiled"},
        "click": {"wire.cli_support"},
        "cryptography": {"wire.authority", "wire.tls"},
    },
    "checkpoint": {"numba": {"checkpoint.blake2b"}, "llvmlite": {"checkpoint.blake2b"}},
}

# Optional libraries are for the integration of that name only.
INTEGRATIONS = {
    "transformers": "learner.integrations.transformers",
    "lightning": "learner.integrations.lightning",
}

# The modules of `yeto-learner`; the rest of the learner does not know what is trained.
COMMAND = ("learner.cli", "learner.options", "learner.progress")

PURE = {
    "checkpoint": {"blake2b", "errors", "format", "snapshot"},
    "learner": {
        "errors", "events", "fragments", "hints", "island", "masters", "parameters",
        "partition", "ranks", "session", "staging", "trees",
    },
    "syncer": {
        "budget", "commands", "config", "context", "coordinator", "ending", "events",
        "finalization", "membership", "pacing", "records", "rounds", "saving", "scheduler",
        "session", "startup", "state",
    },
    "syncer.merge": {"correction", "kernels", "plan", "scaling", "weights"},
    "syncer.svd": {"flatten", "frames", "scalar"},
    "wire": {
        "chunks", "compiled", "connection", "dtypes", "errors", "frames", "identity", "layout",
        "limits", "memory", "messages", "outbox", "q4", "quota", "ranges", "replay", "tensors",
    },
}  # fmt: skip
PURE_MODULES = {f"{room}.{name}" for room, names in PURE.items() for name in names}

TOUCHES_THE_WORLD = {
    "asyncio", "concurrent", "contextvars", "datetime", "fcntl", "glob", "io", "logging", "mmap",
    "multiprocessing", "os", "pathlib", "queue", "random", "sched", "secrets", "select",
    "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "threading",
    "time", "urllib", "uuid", "uvloop",
}  # fmt: skip
EXCEPTIONS = {"wire.memory": {"mmap"}}  # anonymous pages, no file
FORBIDDEN_EVERYWHERE = {"pickle", "cPickle", "dill", "marshal", "shelve"}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the product."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything a module imports, at any depth of the code."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                dotted = ".".join([*source, alias.name])
                yield (dotted if dotted in MODULES else ".".join(source)), node.lineno


def problems_of(name: str) -> Iterator[str]:
    room = name.partition(".")[0]
    for target, line in imports(name):
        top = target.partition(".")[0]
        where = f"{name}:{line} imports {target}"
        if top in FORBIDDEN_EVERYWHERE:
            yield f"{where}: nothing here unpickles"
        elif top in ROOMS:
            if top != room and top not in MAY_IMPORT_ROOMS[room]:
                yield f"{where}: {room} may import {sorted(MAY_IMPORT_ROOMS[room])} only"
            if (
                room == "checkpoint"
                and top == "wire"
                and target not in PURE_MODULES | {"wire.cli_support"}
            ):
                yield f"{where}: checkpoint may use the pure modules of wire only"
            if target.startswith("learner.tasks") and not name.startswith(
                ("learner.tasks", *COMMAND, "benchmarks.", "fuzz.")
            ):
                yield f"{where}: only the command knows the tasks"
        elif top not in sys.stdlib_module_names and room not in AROUND:
            if INTEGRATIONS.get(top) == name:
                continue
            if top not in MAY_IMPORT_LIBRARIES[room]:
                yield f"{where}: not among the libraries of {room}"
            elif name not in (allowed := ONLY_IN.get(room, {}).get(top, {name})):
                yield f"{where}: only {sorted(allowed)} may"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_what_its_room_may(name: str) -> None:
    assert not list(problems_of(name))


@pytest.mark.parametrize("name", sorted(PURE_MODULES))
def test_a_pure_module_touches_nothing(name: str) -> None:
    assert name in MODULES, f"{name} is listed as pure but does not exist"
    found = [
        f"line {line}: imports {target}"
        for target, line in imports(name)
        if target.partition(".")[0] in TOUCHES_THE_WORLD - EXCEPTIONS.get(name, set())
        or (target.partition(".")[0] in ROOMS and target in MODULES and target not in PURE_MODULES)
    ]
    for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8"))):
        if isinstance(node, ast.Name) and node.id in {"open", "print", "input"}:
            found.append(f"line {node.lineno}: uses {node.id}")
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global):
            found.append(f"line {node.lineno}: {type(node).__name__}")
    assert not found


def test_the_checks_see_a_forbidden_import(tmp_path, monkeypatch) -> None:
    source = (
        "from . import loop\nimport learner.session\n"
        "def f():\n    import pickle\n    from checkpoint import store\n"
    )
    path = tmp_path / "bad.py"
    path.write_text(source)
    monkeypatch.setitem(MODULES, "wire.bad", path)
    found = "\n".join(problems_of("wire.bad"))
    assert "wire.bad:2 imports learner.session" in found
    assert "wire.bad:4 imports pickle" in found
    assert "wire.bad:5 imports checkpoint" in found
    assert "wire.bad:1" not in found
