// Chooses what the engine computes next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace meshnet {

// A session that could run a step now.
struct ReadyStep {
    bool prefill = false;
    uint64_t last_served = 0;  // Scheduler::served() of its last step; 0 if it never ran
};

// Rounds: every ready decode step once, then one prefill chunk, so that neither starves the other; within each class
// the session that was served longest ago comes first. One step per choice for now; a later version returns several to
// be computed as one batch.
class Scheduler {
  public:
    // Indices into `ready` of the steps to compute together; empty only if `ready` is.
    std::vector<size_t> choose(const std::vector<ReadyStep> & ready);

    // Number of the latest choice, to be kept as last_served of the chosen.
    uint64_t served() const {
        return served_;
    }

  private:
    uint64_t served_ = 0;
    uint64_t round_start_ = 0;  // sessions with last_served > round_start_ have had their decode step
};

}  // namespace meshnet
