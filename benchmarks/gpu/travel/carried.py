"""Packages that engines need and a lent machine lacks, by the name that import takes: they travel as wheels."""

from faser.kernels.cuda.flashinfer.build import VERSION

CARRIED = {
    "flashinfer": f"flashinfer-python=={VERSION}",
    "tvm_ffi": "apache-tvm-ffi==0.1.15.post2",  # what FlashInfer's modules are loaded by; of one version with them
    "llguidance": "llguidance==1.9.1",
}
