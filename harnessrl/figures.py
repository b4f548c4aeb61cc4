"""Redraws the figures of a checkout's paper_figs/ from committed tables, or first makes the tables from runs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from harnessrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
"""The checkout, where the package is installed with `pip install -e`."""


def figures(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Draw all figures or the named ones.

    Args:
        arguments: names, `list`, out=FOLDER (runs/figures), from=FOLDER (runs whose tables are made first).
        root: where the tables lie.

    Returns:
        the exit code: 1 if a figure that was named has no data yet.
    Raises:
        ConfigError: not in a checkout, an unknown name or key, no such folder.
    """
    known = names()
    if not known:
        raise ConfigError(
            f"figures are drawn from a checkout (git clone, pip install -e '.[figs]'): {ROOT} has no paper_figs"
        )
    wanted, options = _read(arguments, known)
    if wanted == ["list"]:
        for name in known:
            print(f"{name:20} {(_module(name).__doc__ or '').splitlines()[0]}")
        return 0
    modules = {name: _module(name) for name in wanted or known}
    if "from" in options:
        _rebuild(Path(options["from"]), root, list(modules.values()))
    out, absent = Path(options.get("out", "runs/figures")), 0
    for name, module in modules.items():
        missing = [file for file in module.DATA if not (root / file).exists()]
        if missing:
            absent += 1
            print(f"{name}: skipped, no {missing[0]} yet; it is made by: {module.MAKE}", flush=True)
        else:
            _draw(name, module, root, out)
    return 1 if absent and wanted else 0


def names() -> tuple[str, ...]:
    """The figures there are; none outside a checkout."""
    package = _package()
    return package.FIGURES if package else ()


def _package() -> ModuleType | None:
    """The checkout's paper_figs, by its path: whatever else is importable under that name stays out of it."""
    name, file = "paper_figs", ROOT / "paper_figs" / "__init__.py"
    if name not in sys.modules and file.exists():
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules.get(name) if file.exists() else None


def _read(arguments: Sequence[str], known: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    options = dict(item.partition("=")[::2] for item in arguments if "=" in item)
    if unknown := sorted(options.keys() - {"out", "from"}):
        raise ConfigError(f"{unknown[0]}: unknown key; allowed: out=FOLDER, from=FOLDER")
    if empty := [key for key, value in options.items() if not value]:
        raise ConfigError(f"{empty[0]}: expected a folder, got nothing")
    wanted = list(dict.fromkeys(item for item in arguments if "=" not in item))
    if unknown := [name for name in wanted if name not in known and wanted != ["list"]]:
        raise ConfigError(f"{unknown[0]!r} is no figure; allowed: {', '.join(known)}, or `list` alone")
    return wanted, options


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"paper_figs.{name}")


def _rebuild(runs: Path, root: Path, modules: Sequence[ModuleType]) -> None:
    """Each maker of tables once, whichever figures share it."""
    if not runs.is_dir():
        raise ConfigError(f"from: {runs} is no folder")
    sys.path.insert(0, str(ROOT))  # makers may use tests/real
    makers = dict.fromkeys(module.rebuild for module in modules if hasattr(module, "rebuild"))
    told = [line for maker in makers for line in maker(runs, root)]
    print("\n".join(told) if told else f"{runs} holds no run that these figures are drawn from", flush=True)


def _draw(name: str, module: ModuleType, root: Path, out: Path) -> None:
    style = _module("style")
    started = time.monotonic()
    files = [*module.DATA, *(file for file in getattr(module, "ALSO", ()) if (root / file).exists())]
    with style.look():
        figure = style.new_figure()
        module.draw(figure, module.numbers(root))
        try:
            style.save(figure, name, out, style.provenance_of(root, files, getattr(module, "REPORTED", {})))
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(f"out: {out} cannot be written to: {error.strerror}") from error
    print(f"{name}: {out / name}.png, .pdf, .json ({time.monotonic() - started:.1f} s)", flush=True)
