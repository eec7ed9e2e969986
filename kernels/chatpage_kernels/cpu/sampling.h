// Choosing tokens from rows of logits: what a call says, for sampling.cpp.
#pragma once
#include <cstdint>

#include "abi.h"

struct SampleCall {
  const float* raw;    // [.., vocab_size], rows strided: what the model says
  const float* edited;  // likewise, after bias, penalties and masks; raw itself if there are none
  const int32_t* raw_row;     // [num_samples] which row of raw
  const int32_t* edited_row;  // [num_samples] likewise of edited
  const float* temperature;   // [num_samples], 0: the likeliest token
  const int32_t* top_k;       // [num_samples], 0: off
  const double* top_p;        // [num_samples], 1: off
  const double* min_p;        // [num_samples], 0: off
  const double* draw;         // [num_samples] in [0, 1)
  int64_t* token;             // [num_samples], written; -1 if the row holds no distribution
  double* logprob;            // [num_samples], written: of the token, from raw
  int64_t raw_stride, edited_stride;
  int32_t num_samples, vocab_size, num_threads;
};
