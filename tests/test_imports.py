"""The shape of the house: who may import whom, what importing costs, and that dvc.yaml names every file a stage runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tasks.core.config import Params
from tasks.core.process import QUIET

ROOT = Path(__file__).parents[1]
STAGES = ("ingest", "validate", "prepare", "augment", "train", "evaluate", "gate", "register", "package", "deploy")
LIBRARY = {
    "tasks.core": {"tasks.core"},
    "tasks.sources": {"tasks.core", "tasks.sources"},
    "tasks.images": {"tasks.core", "tasks.images"},
    "tasks.training": {"tasks.core", "tasks.images", "tasks.training"},
    "tasks.backends": {"tasks.core", "tasks.backends"},
    "service": {"service", "tasks.images.decode"},
    "flows": {"flows", "tasks.core", *(f"tasks.{stage}" for stage in STAGES)},
}
FOR_STAGES = {"tasks.core", "tasks.sources", "tasks.images", "tasks.training", "tasks.backends"}
ONLY_IN = {
    "prefect": ("flows",),
    "great_expectations": ("tasks.validate",),
    "bentoml": ("tasks.package", "tasks.deploy", "service"),
    "mlflow": ("tasks.backends",),
    "dvc": ("tasks.backends",),
}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of ours that ships."""
    found = {}
    for folder in ("flows", "tasks", "service"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def imported(name: str, lazily_too: bool = True) -> frozenset[str]:
    """Every dotted name that a module imports (``from a import b`` counts as a.b where that is a module of ours)."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if lazily_too else iter(tree.body)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            base = node.module or ""
            inner = {f"{base}.{alias.name}" for alias in node.names}
            ours = inner & set(MODULES)
            names |= ours | ({base} if ours != inner or base not in MODULES else set())
    return frozenset(names)


def ours(name: str) -> set[str]:
    return {found for found in imported(name) if found.split(".")[0] in ("flows", "tasks", "service")} - {"tasks", "flows"}


def below(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_import_only_what_their_room_allows(name: str) -> None:
    if name in ("tasks", "flows", "service"):
        allowed: set[str] = set()
    elif name == "tasks.sources.review":
        allowed = LIBRARY["tasks.sources"] | LIBRARY["tasks.images"] | {"tasks.training.predict"}
    elif name == "tasks.sources.__main__":  # a command, as review is, which nothing imports
        allowed = LIBRARY["tasks.sources"] | LIBRARY["tasks.images"] | {"tasks.ingest"}
    elif name.split(".")[-1] in STAGES and name.count(".") == 1:
        allowed = FOR_STAGES
    else:
        room = ".".join(name.split(".")[:2]) if name.startswith("tasks.") else name.split(".")[0]
        allowed = LIBRARY[room]
    stray = {found for found in ours(name) if not below(found, allowed)}
    assert not stray, f"{name} must not import {sorted(stray)}"


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_each_sdk_has_its_own_rooms(package: str) -> None:
    users = {name for name in MODULES if below_any(package, imported(name))}
    stray = {name for name in users if not below(name, set(ONLY_IN[package]))}
    assert users, f"nothing imports {package}"
    assert not stray


def below_any(package: str, names: frozenset[str]) -> bool:
    return any(found == package or found.startswith(f"{package}.") for found in names)


def test_every_stage_is_a_file() -> None:
    files = {path.stem for path in (ROOT / "tasks").glob("*.py")} - {"__init__"}
    assert files == set(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_main_is_at_most_ten_lines(stage: str) -> None:
    tree = ast.parse((ROOT / "tasks" / f"{stage}.py").read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    body = main.body[1:] if ast.get_docstring(main) else main.body
    assert body[-1].end_lineno is not None
    assert body[-1].end_lineno - body[0].lineno + 1 <= 10


def imports_of(module: str) -> set[str]:
    code = f"import sys, {module}; print(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_flow_imports_no_heavy_library() -> None:
    assert not imports_of("flows.retrain") & {"torch", "torchvision", "mlflow", "bentoml", "great_expectations", "onnxruntime", "pandas", "sklearn"}


@pytest.mark.parametrize("stage", STAGES)
def test_importing_a_stage_loads_nothing_heavy_that_it_can_load_later(stage: str) -> None:
    heavy = {"mlflow", "great_expectations", "prefect", "sklearn", "matplotlib"}
    if stage not in ("train", "augment"):
        heavy |= {"torch"}
    assert not imports_of(f"tasks.{stage}") & heavy


def test_importing_everything_makes_no_file(tmp_path: Path) -> None:
    names = [name for name in MODULES if not name.startswith("service")]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(names)}"
    subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, check=True, env={"PATH": "/usr/bin", "HOME": str(tmp_path)})
    left = {path.name for path in tmp_path.iterdir()} - {".prefect", ".cache", ".config"}
    assert not left


def pipeline() -> dict[str, Any]:
    tree: dict[str, Any] = YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")
    return tree


def closure(name: str) -> set[str]:
    """``name`` and every module of ours that it imports, directly or not, with the packages above them."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        module = todo.pop()
        if module in seen or module not in MODULES:
            continue
        seen.add(module)
        parts = module.split(".")
        todo += [".".join(parts[:length]) for length in range(1, len(parts))]
        todo += ours(module)
    return seen


@pytest.mark.parametrize("stage", sorted(pipeline()["stages"]))
def test_dvc_deps_cover_every_file_a_stage_imports(stage: str) -> None:
    """A stage whose code changed must be stale; a dep that it does not import would make it stale for nothing."""
    deps = [dep for dep in pipeline()["stages"][stage]["deps"] if dep.startswith(("tasks", "service"))]
    runs = closure(f"tasks.{stage}") | (closure("service.app") if stage == "package" else set())  # the Bento ships the service's sources
    needed = {str(MODULES[name].relative_to(ROOT)) for name in runs}
    missing = {path for path in needed if not any(path == dep or path.startswith(f"{dep}/") for dep in deps)}
    assert not missing
    idle = {dep for dep in deps if dep != "service" and not any(path == dep or path.startswith(f"{dep}/") for path in needed)}
    assert not idle


@pytest.mark.parametrize("stage", sorted(pipeline()["stages"]))
def test_dvc_params_are_sections_of_the_config(stage: str) -> None:
    sections = {field.alias or name for name, field in Params.model_fields.items()}
    params = pipeline()["stages"][stage]["params"]
    assert stage in params
    assert set(params) <= sections
    assert pipeline()["stages"][stage]["cmd"] == f"python -m tasks.{stage}"


def test_every_param_a_stage_reads_is_declared_to_dvc() -> None:
    """``params.SECTION`` in a stage's main() must stand in dvc.yaml, or a change of it would go unnoticed."""
    for stage, entry in pipeline()["stages"].items():
        tree = ast.parse((ROOT / "tasks" / f"{stage}.py").read_text(encoding="utf-8"))
        main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
        nodes = [node for node in ast.walk(main) if isinstance(node, ast.Attribute)]
        read = {node.attr.rstrip("_") for node in nodes if ast.unparse(node.value) in ("params", "load_params()")}
        assert read == set(entry["params"]), stage


def test_the_makefile_turns_off_the_same_telemetry_as_the_code() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    exported = dict(
        line.removeprefix("export ").split(" := ", 1) for line in makefile.splitlines() if line.startswith("export ") and " := $" not in line
    )
    assert exported == QUIET
