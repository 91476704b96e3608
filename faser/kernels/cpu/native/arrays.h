// Arrays of numpy, by their Python objects: to ask Python for the address of what an array holds takes longer than most
// of what is computed for one sequence. The address follows the object's header (PyArrayObject_fields of numpy's C API),
// which kernels/cpu/library.py checks. Arrays are contiguous, of 64-bit integers or doubles.
#pragma once

#include <cstdint>

namespace faser {

using Array = const void*;
constexpr int64_t kHeaderBytes = 16;

template <class T>
T* held_by(Array array) {
    return *reinterpret_cast<T* const*>(static_cast<const char*>(array) + kHeaderBytes);
}
inline int64_t* ints(Array array) { return held_by<int64_t>(array); }
inline double* reals(Array array) { return held_by<double>(array); }

}  // namespace faser
