// Drafts that are copied from text, for code that goes on with them natively: see faser_texts_look in lookup.cpp.
#pragma once

#include <cstdint>

struct FaserTexts;

namespace faser {

// Methods that a call asks.
int64_t num_methods(const FaserTexts* texts);

// faser_texts_look over memory of the caller's own. 0: no fault.
int32_t look_up(FaserTexts* texts, const int64_t* numbers, const int64_t* most, const int64_t* num_unverified,
                int64_t num_texts, const int32_t* unverified, int64_t width, int64_t* lengths, int64_t* tokens,
                double* confidences);

}  // namespace faser
