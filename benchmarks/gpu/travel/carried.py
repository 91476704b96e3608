"""Packages that engines need and a lent machine lacks, by the name that import takes: they travel as wheels."""

from faser.kernels.cuda.flashinfer.build import VERSION

CARRIED = {
    "flashinfer": f"flashinfer-python=={VERSION}",
    "tvm_ffi": "apache-tvm-ffi==0.1.15.post2",  # what FlashInfer's modules are loaded by; of one version with them
    "llguidance": "llguidance==1.9.1",
}
TRITON = "3.6.0"  # of a lent machine
# Wheels for a machine with a glibc of 2.39 or later; pip takes every tag literally.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 5)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
