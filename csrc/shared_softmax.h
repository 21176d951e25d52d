// The cross-entropy of choosing a true row among candidates that all queries share, with its gradients: scores are dot
// products. The matrix of scores is never in memory.
#pragma once
#include <cstdint>

namespace hoploom {

struct SharedChoice {
  const float *queries, *truths;  // [count, width]: row i of `truths` is the one that query i should choose
  const float* candidates;        // [num_candidates, width]
  int64_t count, num_candidates, width;
  float temperature;
  const float* weights;  // [count] of the losses in the sum that is differentiated; null: 1
};

// Gradients of the weighted sum of losses.
struct ChoiceGradients {
  float *queries, *truths;  // [count, width]
  float* candidates;        // [num_candidates, width]
};

// Writes the loss of each query, without weights, to `losses` [count], and the gradients. They do not depend on the
// number of threads.
void shared_softmax(const SharedChoice& given, int threads, float* losses, const ChoiceGradients& gradients);

}  // namespace hoploom
