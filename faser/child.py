"""The program that every Python child of FASER runs: `python -P faser/child.py MODULE ARGUMENT…`.

It runs a module as `python -m MODULE` would, with two differences. Nothing is imported from the working directory,
which may hold files of any name, and `faser` is the package of this file, whatever sys.path would find. Commands
are made by processes.python_command.
"""

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def _import_this_package() -> None:
    folder = Path(__file__).parent
    spec = spec_from_file_location(folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[folder.name] = module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    del sys.argv[0]
    _import_this_package()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
