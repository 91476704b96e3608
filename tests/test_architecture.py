"""Imports point down, the control plane is free of torch, and two things are done in one place only.

Every module of the package belongs to a layer, by name; a new one must be given its place here. The checks
read syntax trees, imports inside functions included, and are themselves tried on small trees with a fault.
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "faser"


class Layer(Enum):
    FOUNDATION = "types, errors, config: values without torch"
    COMMON = "what both planes and the front-end know: plans, messages, tokenizer, a model's description"
    CONTROL = "who runs, in which blocks"
    KERNELS = "arithmetic"
    DATA = "models and sampling on tensors"
    ENGINE = "the step loop, and what puts it together"
    FACE = "the asyncio face of the engine"
    API = "HTTP"
    CLI = "command line and offline use"


LAYERS: dict[Layer, tuple[str, ...]] = {
    Layer.FOUNDATION: (
        "",
        "types",
        "errors",
        "config",
        "setting",
        "machine",
        "metrics",
        "speculation",
        "speculation_keys",
        "speculation_metrics",
        "speculation_parser",
    ),
    Layer.COMMON: (
        "engine",
        "engine.plan",
        "engine.spec",
        "engine.cost_model",
        "engine.spec.prune_calibration",
        "engine.spec.prune_gate",
        "engine.co_run",
        "engine.executor",
        "engine.step_trace",
        "engine.transport",
        "engine.tokenizer",
        "engine.token_spelling",
        "engine.length_bound",
        "engine.detokenizer",
        "engine.models",
        "engine.models.spec",
        "engine.models.families.*",
        "engine.models.config_json",
        "engine.models.quantization",
        "engine.models.source",
        "engine.models.embedded",
        "engine.models.gguf",
        "engine.models.gguf_config",
        "engine.models.gguf_tokenizer",
    ),
    Layer.CONTROL: (
        "engine.scheduler",
        "engine.sequence",
        "engine.kv_cache",
        "engine.step",
        "engine.clock",
        "engine.spec.policy",
        "engine.spec.policies.*",
        "engine.spec.acceptance",
        "engine.spec.drift",
        "engine.spec.calibration",
        "engine.spec.control",
        "engine.spec.drafted",
        "engine.spec.journal",
        "engine.spec.pruned",
        "engine.spec.roster",
        "engine.spec.standing",
        "engine.spec.ahead",
        "engine.spec.overlap",
        "engine.spec.frontier",
        "engine.spec.tally",
    ),
    Layer.KERNELS: ("kernels.*",),
    Layer.DATA: (
        "engine.model_executor",
        "engine.prompt_scores",
        "engine.choosing",
        "engine.requests",
        "engine.graph_sizes",
        "engine.graphs",
        "engine.step_recordings",
        "engine.runner",
        "engine.batch",
        "engine.sampler",
        "engine.torch_choice",
        "engine.sampling",
        "engine.ranking",
        "engine.noise",
        "engine.logprobs",
        "engine.processors",
        "engine.sampling_state",
        "engine.token_counts",
        "engine.profile",
        "engine.stopwatch",
        "engine.lane_cells",
        "engine.lane_work",
        "engine.rehearsal",
        "engine.partition",
        "engine.lane_thread",
        "engine.stream_lanes",
        "engine.lanes",
        "engine.gpu_partition",
        "engine.gpu_shares",
        "engine.kept_rates",
        "engine.co_run_profile",
        "engine.spec.drafter",
        "engine.spec.draft_model",
        "engine.spec.draft_choice",
        "engine.spec.draft_kv",
        "engine.spec.passes",
        "engine.spec.fed_passes",
        "engine.spec.pruning",
        "engine.spec.layer_skip",
        "engine.spec.ngram",
        "engine.spec.suffix",
        "engine.spec.text_lookup",
        "engine.spec.native_lookup",
        "engine.spec.prediction",
        "engine.spec.corpus",
        "engine.spec.chooser",
        "engine.spec.evidence",
        "engine.spec.recorder",
        "engine.spec.verify",
        "engine.spec.verifiers.*",
        "engine.spec.factory",
        "engine.models.decoder",
        "engine.models.loader",
        "engine.models.rope",
        "engine.models.tensors",
        "engine.models.weights",
        "engine.models.safetensors_source",
        "engine.models.stored_fp8",
    ),
    Layer.ENGINE: (
        "engine.engine",
        "engine.build",
        "engine.compiling",
        "engine.device",
        "engine.loading",
        "engine.memory_budget",
        "engine.runners",
        "engine.gpu_budget",
        "engine.sizing",
        "engine.worker",
    ),
    Layer.FACE: ("engine.async_engine", "engine.engine_host", "engine.output_stream"),
    Layer.API: ("api.*",),
    Layer.CLI: ("cli.*", "bench.*", "sim.*", "offline", "__main__"),
}

_UP_TO_COMMON = {Layer.FOUNDATION, Layer.COMMON}
_UP_TO_ENGINE = _UP_TO_COMMON | {Layer.CONTROL, Layer.KERNELS, Layer.DATA, Layer.ENGINE}
MAY_IMPORT: dict[Layer, set[Layer]] = {
    Layer.FOUNDATION: {Layer.FOUNDATION},
    Layer.COMMON: _UP_TO_COMMON,
    Layer.CONTROL: _UP_TO_COMMON | {Layer.CONTROL},
    Layer.KERNELS: {Layer.FOUNDATION, Layer.KERNELS},
    Layer.DATA: _UP_TO_COMMON | {Layer.KERNELS, Layer.DATA},
    Layer.ENGINE: _UP_TO_ENGINE,
    Layer.FACE: _UP_TO_ENGINE | {Layer.FACE},
    Layer.API: _UP_TO_COMMON | {Layer.FACE, Layer.API},
    Layer.CLI: _UP_TO_ENGINE | {Layer.FACE, Layer.API, Layer.CLI},
}
WITHOUT_TORCH = set(Layer) - {Layer.KERNELS, Layer.DATA, Layer.ENGINE}

# The package's front door hands out LLM on demand; the layers below never ask it to.
FRONT_DOOR = ("", "offline")


@functools.cache
def modules(package: Path) -> dict[str, ast.Module]:
    """Syntax tree by module name, relative to the package: "engine.plan"; the package itself is ""."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def layer_of(module: str) -> Layer | None:
    """None: the table has no place for it."""
    for layer, names in LAYERS.items():
        for name in names:
            base = name.removesuffix(".*")
            if module == base or (name.endswith(".*") and module.startswith(base + ".")):
                return layer
    return None


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
            found.append(f"{module}: has no layer; give it one in this file")
            continue
        for target in imported(tree, trees, package=package.name):
            target_layer = layer_of(target)
            if target_layer not in MAY_IMPORT[layer] and (module, target) != FRONT_DOOR:
                found.append(f"{module} ({layer.name}) imports {target} ({target_layer and target_layer.name})")
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
    assert loads_heavy(names, ("torch", "transformers"), PACKAGE.parent) == []


def test_transformers_is_never_imported() -> None:
    assert imports_of(PACKAGE, "transformers") == set()


def test_flashinfer_is_imported_by_kernels_only() -> None:
    assert all(module.startswith("kernels.") for module in imports_of(PACKAGE, "flashinfer"))


def test_the_environment_is_read_in_config_only() -> None:
    assert environment_readers(PACKAGE) <= {"config"}


def test_nobody_names_a_module_that_is_gone() -> None:
    """The table of layers stays true: every entry is a module."""
    present = set(modules(PACKAGE))
    listed = {name.removesuffix(".*") for names in LAYERS.values() for name in names}
    assert listed - present == set()


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


@pytest.mark.parametrize(
    "module, text",
    [
        ("engine.scheduler", "from faser.engine.runner import Runner"),
        ("engine.scheduler", "def plan():\n    from faser.engine import runner"),
        ("engine.runner", "import faser.engine.scheduler"),
        ("types", "from faser.api.app import App"),
        ("kernels.backend", "from faser.engine.plan import StepPlan"),
        ("api.app", "from faser.engine.build import build"),
        ("engine.engine", "if True:\n    import faser.cli.main as main"),
    ],
)
def test_an_import_that_points_up_or_across_is_found(tmp_path: Path, module: str, text: str) -> None:
    below = ["engine.runner", "engine.scheduler", "engine.plan", "engine.build", "api.app", "cli.main"]
    package = plant(tmp_path, dict.fromkeys(below, "") | {module: text})
    (fault,) = upward_imports(package)
    assert fault.startswith(f"{module} (")


def test_an_import_that_points_down_is_fine(tmp_path: Path) -> None:
    below = {"types": "", "engine.plan": "from faser.types import Request"}
    assert upward_imports(plant(tmp_path, below | {"engine.scheduler": "from faser.engine import plan"})) == []


def test_a_module_without_a_layer_is_found(tmp_path: Path) -> None:
    assert upward_imports(plant(tmp_path, {"engine.misc": ""})) == [
        "engine.misc: has no layer; give it one in this file"
    ]


def test_a_heavy_library_is_found_behind_a_detour(tmp_path: Path) -> None:
    plant(tmp_path, {"engine.scheduler": "import faser.engine.detour", "engine.detour": "import heavy"})
    (tmp_path / "heavy.py").touch()
    names = ["faser.engine", "faser.engine.scheduler"]
    assert loads_heavy(names, ("heavy",), tmp_path) == ["faser.engine.scheduler loads heavy"]


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
