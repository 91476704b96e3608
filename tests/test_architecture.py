"""The folder says the layer, imports point down and never in a circle, and torch stays in its plane.

The checks read syntax trees, imports inside functions included, and are tried on small trees with a planted fault.
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "faser"
BENCHMARKS = PACKAGE.parent / "benchmarks"


class Layer(Enum):
    """Folders and modules of each layer. The longest prefix that fits a module's name decides."""

    VALUES = ("types", "errors", "observer", "machine", "files", "processes", "child", "logs", "memo", "optional")
    CONFIG = ("config",)
    METRICS = ("metrics",)
    TRACING = ("tracing", "tracing_sdk")
    CONTRACT = ("engine.contract",)
    CHECKPOINTS = ("engine.checkpoints",)
    TEXT = ("engine.text", "engine.structure")
    CONTROL = ("engine.control",)
    KERNELS = ("kernels",)
    EXECUTION = ("engine.execution",)
    ENGINE = (
        "engine.engine",
        "engine.encoder_engine",
        "engine.audit",
        "engine.gap_timer",
        "engine.build",
        "engine.worker",
        "engine.preparation",
        "engine.adapter_loads",
        "engine.step_trace",
        "engine.kv_events",
    )
    CLIENT = ("engine.client",)
    API = ("api",)
    DISTILL = ("distill",)
    COMMANDS = ("cli", "offline", "outputs", "sampling_params", "__main__")
    RAY = ("ray",)


# Packages that hold several layers; what they say themselves is a docstring, and the front door of the whole.
PACKAGES = {"": Layer.VALUES, "engine": Layer.CONTRACT}

_BELOW = {Layer.VALUES, Layer.CONFIG}
_CONTRACT = _BELOW | {Layer.CONTRACT, Layer.CHECKPOINTS, Layer.TEXT}
_ALL_OF_THE_ENGINE = _CONTRACT | {Layer.CONTROL, Layer.KERNELS, Layer.EXECUTION, Layer.ENGINE}
MAY_IMPORT: dict[Layer, set[Layer]] = {
    Layer.VALUES: {Layer.VALUES},
    Layer.CONFIG: _BELOW,
    Layer.METRICS: _BELOW | {Layer.METRICS},
    Layer.TRACING: _BELOW | {Layer.TRACING},
    Layer.CONTRACT: _CONTRACT,
    Layer.CHECKPOINTS: _BELOW | {Layer.CHECKPOINTS},
    Layer.TEXT: _BELOW | {Layer.CHECKPOINTS, Layer.TEXT},
    Layer.CONTROL: _CONTRACT | {Layer.CONTROL},
    Layer.KERNELS: _BELOW | {Layer.KERNELS},
    Layer.EXECUTION: _CONTRACT | {Layer.KERNELS, Layer.EXECUTION},
    Layer.ENGINE: _ALL_OF_THE_ENGINE,
    Layer.CLIENT: _CONTRACT | {Layer.ENGINE, Layer.CLIENT},
    Layer.API: _CONTRACT | {Layer.METRICS, Layer.TRACING, Layer.CLIENT, Layer.API},
    Layer.DISTILL: _ALL_OF_THE_ENGINE | {Layer.CLIENT, Layer.API, Layer.DISTILL},
    Layer.COMMANDS: _ALL_OF_THE_ENGINE
    | {Layer.METRICS, Layer.TRACING, Layer.CLIENT, Layer.API, Layer.DISTILL, Layer.COMMANDS},
    Layer.RAY: _BELOW | {Layer.CLIENT, Layer.API, Layer.COMMANDS, Layer.RAY},
}
WITHOUT_TORCH = set(Layer) - {Layer.KERNELS, Layer.EXECUTION, Layer.ENGINE, Layer.DISTILL}

# The package's front door hands out LLM and its parameters on demand; the layers below never ask it to.
FRONT_DOOR = {("", "offline"), ("", "sampling_params")}


@functools.cache
def modules(package: Path) -> dict[str, ast.Module]:
    """Syntax tree by module name, relative to the package: "engine.plan"; the package itself is ""."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def layer_of(module: str) -> Layer | None:
    """None: no layer has a prefix that fits. A package is of the layer of its modules."""
    fitting = {
        prefix: layer
        for layer in Layer
        for prefix in layer.value
        if module == prefix or module.startswith(prefix + ".")
    }
    return fitting[max(fitting, key=len)] if fitting else PACKAGES.get(module)


def imported(tree: ast.AST, known: dict[str, ast.Module], *, package: str) -> Iterator[str]:
    """Modules of the package that a tree imports, at any depth, as names relative to the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix(package + ".") in known else base for name in names]
        else:
            continue
        for name in names:
            if name == package or name.startswith(package + "."):
                yield name.removeprefix(package).removeprefix(".")


def upward_imports(package: Path) -> list[str]:
    """Imports that point up or across, and modules without a layer."""
    found = []
    trees = modules(package)
    for module, tree in trees.items():
        layer = layer_of(module)
        if layer is None:
            found.append(f"{module}: its folder has no layer; give it one in this file")
            continue
        for target in imported(tree, trees, package=package.name):
            target_layer = layer_of(target)
            if target_layer not in MAY_IMPORT[layer] and (module, target) not in FRONT_DOOR:
                found.append(f"{module} ({layer.name}) imports {target} ({target_layer and target_layer.name})")
    return found


def module_imports(package: Path) -> dict[str, set[str]]:
    """What each module imports when it is loaded, or later; but for the front door."""
    trees = modules(package)
    return {
        module: {target for target in imported(tree, trees, package=package.name) if target in trees}
        for module, tree in trees.items()
        if module
    }


def folder_imports(package: Path) -> dict[str, set[str]]:
    """The same between folders. A module that lies next to folders stands for itself."""
    packages = {
        path.parent.relative_to(package).as_posix().replace("/", ".") for path in package.rglob("*/__init__.py")
    }
    with_folders = {"", *(each.rpartition(".")[0] for each in packages)}

    def folder(module: str) -> str:
        owner = module.rpartition(".")[0]
        return module if module in packages or owner in with_folders else owner

    found: dict[str, set[str]] = {}
    for module, targets in module_imports(package).items():
        found.setdefault(folder(module), set()).update(folder(target) for target in targets)
    return {each: targets - {each} for each, targets in found.items()}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups in which each can be reached from each other, sorted."""
    reached = {each: _reached(each, imports) for each in imports}
    groups = {
        tuple(sorted({each, *(other for other in reached[each] if each in reached.get(other, ()))}))
        for each in imports
        if each in reached[each]
    }
    return sorted(map(list, groups))


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in imports.get(waiting.pop(), ()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def imports_of(package: Path, library: str) -> set[str]:
    """Modules that import a library, or a part of it."""
    return {
        module
        for module, tree in modules(package).items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == library for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library)
    }


def environment_readers(package: Path) -> set[str]:
    """Modules that touch os.environ, or get at it through a function of os."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    return {
        module
        for module, tree in modules(package).items()
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        )
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names))
    }


def child_starters(package: Path) -> set[str]:
    """Modules that could start a Python child that imports from the working directory."""
    return imports_of(package, "multiprocessing") | {
        module
        for module, tree in modules(package).items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable")
        or (isinstance(node, ast.alias) and node.name in ("executable", "ProcessPoolExecutor"))
        or (
            isinstance(node, ast.List | ast.Tuple)
            and "-m" in (getattr(each, "value", None) for each in node.elts[1:])
        )
    }


def loads_heavy(module_names: list[str], heavy: tuple[str, ...], path: Path) -> list[str]:
    """Which of the modules, imported one after the other by a fresh interpreter, bring in a heavy library."""
    program = """
import importlib, json, sys
names, heavy = json.loads(sys.stdin.read())
found = []
for name in names:
    importlib.import_module(name)
    for library in heavy:
        if library in sys.modules:
            found.append(f"{name} loads {library}")
            heavy = [each for each in heavy if each != library]
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([module_names, heavy]),
        capture_output=True,
        text=True,
        cwd=path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_imports_point_down() -> None:
    assert upward_imports(PACKAGE) == []


def test_torch_and_transformers_are_loaded_by_the_data_plane_only() -> None:
    names = [f"faser.{module}".rstrip(".") for module in modules(PACKAGE) if layer_of(module) in WITHOUT_TORCH]
    names.remove("faser.__main__")
    if find_spec("ray") is None:  # make ray installs it
        names = [name for name in names if not name.startswith("faser.ray.")]
    assert loads_heavy(names, ("torch", "transformers"), PACKAGE.parent) == []


def test_transformers_is_never_imported() -> None:
    assert imports_of(PACKAGE, "transformers") == set()


def test_flashinfer_is_imported_by_kernels_only() -> None:
    assert all(module.startswith("kernels.") for module in imports_of(PACKAGE, "flashinfer"))


def test_the_environment_is_read_in_config_only() -> None:
    assert environment_readers(PACKAGE) <= {"config.environment"}


def test_python_children_are_started_by_one_function() -> None:
    assert child_starters(PACKAGE) == {"processes"}


def test_every_prefix_of_a_layer_names_a_module_or_a_folder() -> None:
    present = set(modules(PACKAGE))
    assert {prefix for layer in Layer for prefix in layer.value} - present == set()


@pytest.mark.parametrize("package", [PACKAGE, BENCHMARKS], ids=lambda package: package.name)
def test_no_two_modules_import_each_other(package: Path) -> None:
    assert circles(module_imports(package)) == []


@pytest.mark.parametrize("package", [PACKAGE, BENCHMARKS], ids=lambda package: package.name)
def test_no_two_folders_import_each_other(package: Path) -> None:
    assert circles(folder_imports(package)) == []


def plant(root: Path, files: dict[str, str]) -> Path:
    """A package named like ours with these modules; everything that leads to them is made too."""
    package = root / "faser"
    for name, text in files.items():
        path = package / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()
    return package


BELOW = (
    "types",
    "engine.contract.plan",
    "engine.control.scheduler",
    "engine.execution.runner",
    "engine.build",
    "kernels.backend",
    "api.app",
    "cli.main",
)


@pytest.mark.parametrize(
    "module, text",
    [
        ("engine.control.scheduler", "from faser.engine.execution.runner import Runner"),
        ("engine.control.scheduler", "def plan():\n    from faser.engine.execution import runner"),
        ("engine.execution.runner", "import faser.engine.control.scheduler"),
        ("types", "from faser.api.app import App"),
        ("kernels.backend", "from faser.engine.contract.plan import StepPlan"),
        ("api.app", "from faser.engine.build import build"),
        ("engine.engine", "if True:\n    import faser.cli.main as main"),
    ],
)
def test_an_import_that_points_up_or_across_is_found(tmp_path: Path, module: str, text: str) -> None:
    package = plant(tmp_path, dict.fromkeys(BELOW, "") | {module: text})
    (fault,) = upward_imports(package)
    assert fault.startswith(f"{module} (")


def test_an_import_that_points_down_is_fine(tmp_path: Path) -> None:
    below = {"types": "", "engine.contract.plan": "from faser.types.request import Request"}
    scheduler = {"engine.control.scheduler": "from faser.engine.contract import plan"}
    assert upward_imports(plant(tmp_path, below | scheduler)) == []


def test_a_circle_of_modules_is_found(tmp_path: Path) -> None:
    circle = {"api.one": "import faser.api.two", "api.two": "def f():\n    from faser.api import three"}
    package = plant(
        tmp_path, circle | {"api.three": "from faser.api.one import x", "api.four": "import faser.api.one"}
    )
    assert circles(module_imports(package)) == [["api.one", "api.three", "api.two"]]


def test_a_circle_of_folders_is_found_where_no_two_modules_form_one(tmp_path: Path) -> None:
    there = {
        "api.rooms.chat": "import faser.api.pages.errors",
        "api.pages.errors": "",
        "api.pages.app": "import faser.api.rooms.chat",
    }
    package = plant(tmp_path, there)
    assert circles(module_imports(package)) == []
    assert circles(folder_imports(package)) == [["api.pages", "api.rooms"]]


def test_modules_next_to_a_folder_may_lie_above_and_below_it_but_not_both(tmp_path: Path) -> None:
    there = {"api.rooms.chat": "import faser.api.errors", "api.rooms.models": "", "api.errors": ""}
    app = {"api.app": "import faser.api.rooms.chat"}
    assert circles(folder_imports(plant(tmp_path / "one", there | app))) == []
    both = {"api.errors": "import faser.api.rooms.models"}
    assert circles(folder_imports(plant(tmp_path / "both", there | both))) == [["api.errors", "api.rooms"]]


def test_a_module_without_a_layer_is_found(tmp_path: Path) -> None:
    assert upward_imports(plant(tmp_path, {"engine.misc": ""})) == [
        "engine.misc: its folder has no layer; give it one in this file"
    ]


def test_a_heavy_library_is_found_behind_a_detour(tmp_path: Path) -> None:
    plant(tmp_path, {"engine.control.scheduler": "import faser.engine.detour", "engine.detour": "import heavy"})
    (tmp_path / "heavy.py").touch()
    names = ["faser.engine", "faser.engine.control.scheduler"]
    assert loads_heavy(names, ("heavy",), tmp_path) == ["faser.engine.control.scheduler loads heavy"]


@pytest.mark.parametrize(
    "text",
    ["import flashinfer", "from flashinfer.sampling import x", "def f():\n    import flashinfer.decode as d"],
)
def test_an_import_of_flashinfer_is_found(tmp_path: Path, text: str) -> None:
    assert imports_of(plant(tmp_path, {"engine.runner": text}), "flashinfer") == {"engine.runner"}


@pytest.mark.parametrize(
    "text",
    [
        "import os\nx = os.environ['A']",
        "import os\ndef f():\n    return os.getenv('A')",
        "from os import environ",
    ],
)
def test_a_look_at_the_environment_is_found(tmp_path: Path, text: str) -> None:
    assert environment_readers(plant(tmp_path, {"engine.runner": text})) == {"engine.runner"}


@pytest.mark.parametrize(
    "text",
    [
        "import sys\ncommand = [sys.executable, '-P']",
        "from sys import executable",
        "def f(python):\n    return [python, '-m', 'faser.engine.worker']",
        "import multiprocessing.pool",
        "from multiprocessing import get_context",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_a_python_child_that_another_module_starts_is_found(tmp_path: Path, text: str) -> None:
    assert child_starters(plant(tmp_path, {"engine.runner": text})) == {"engine.runner"}
