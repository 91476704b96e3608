#!/bin/sh
# trim.sh ENVIRONMENT: removes from an environment of Python what a server never opens, and compiles the rest.
#
# Torch: its tests, headers, CMake files and the programs in bin (torch_shm_manager is needed to import it), and the
# symbols of its two largest libraries that only a debugger reads. Bytecode is compiled without times in it: a copy of
# the files may change their times, and the root of a container cannot be written.
set -eu
cd "$1"/lib/python3*/site-packages

rm -rf torch/include torch/share torch/test
find torch/bin -type f ! -name torch_shm_manager -delete
rm -f torch/lib/lib*_test.so torch/lib/libaoti_custom_ops.so torch/lib/libbackend_with_compiler.so
find sympy networkx mpmath -type d -name tests -prune -exec rm -rf {} +
for library in torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so; do
    strip --strip-unneeded "$library"
done
"$1"/bin/python -m compileall -q --invalidation-mode unchecked-hash . \
    -x '/py31[0-9]_[a-z_]*\.py$'  # torch has a file for each later Python
"$1"/bin/python -c 'import torch; assert (torch.ones(64, 64) @ torch.ones(64, 64)).sum() == 64 ** 3'
"$1"/bin/python -m pip check
