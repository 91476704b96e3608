/* A stand-in of the CUDA runtime for host code of compiled modules: a GPU of compute capability 9.0 that has a number
   of processors and never computes. Its memory is the host's. */

#include <stdlib.h>
#include <string.h>

int processors = 132;

int cudaGetDevice(int *device) {
  *device = 0;
  return 0;
}

int cudaSetDevice(int device) { return device; }

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 16: /* cudaDevAttrMultiProcessorCount */
      *value = processors;
      return device;
    case 75: /* cudaDevAttrComputeCapabilityMajor */
      *value = 9;
      return device;
    case 76: /* cudaDevAttrComputeCapabilityMinor */
      *value = 0;
      return device;
    case 97: /* cudaDevAttrMaxSharedMemoryPerBlockOptin */
      *value = 227 << 10;
      return device;
    default:
      abort();
  }
}

int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
  (void)kind, (void)stream;
  memcpy(target, source, size);
  return 0;
}

const char *cudaGetErrorName(int error) { return error ? "error" : "success"; }
const char *cudaGetErrorString(int error) { return error ? "an error" : "no error"; }

/* Called when a module is loaded, to no effect. */
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  (void)binary;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

/* Nothing is launched. */
int cudaFuncSetAttribute(void) { abort(); }
int cudaLaunchKernel(void) { abort(); }
int cudaLaunchKernelExC(void) { abort(); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(void) { abort(); }
int __cudaGetKernel(void) { abort(); }
int __cudaLaunchKernel(void) { abort(); }
int __cudaPopCallConfiguration(void) { abort(); }
int __cudaPushCallConfiguration(void) { abort(); }
