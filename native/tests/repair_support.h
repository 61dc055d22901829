// A generation that is interrupted and goes on over a repaired route, as a gateway does it: beside the undisturbed one.
#pragma once

#include "tests/worker_support.h"

namespace meshnet::test {

struct RepairCase {
    std::function<std::unique_ptr<Hop>(size_t hop)> make_hop;
    size_t n_hops = 3;
    std::vector<uint32_t> prompt;
    uint32_t n_new = 0;
    uint32_t chunk_tokens = 8;
    v1::SamplingParams sampling;
    bool can_rollback = true;

    uint32_t chunks() const {
        return (static_cast<uint32_t>(prompt.size()) + chunk_tokens - 1) / chunk_tokens;
    }
};

struct Interruption {
    size_t victim = 0;        // the hop that is replaced
    uint32_t tail_steps = 0;  // so many steps the tail computes in this epoch; it is held in the next one
    // The victim goes on for as long as it can: its late frames must do no harm.
    bool victim_lives = false;
};

struct Answer {
    std::vector<v1::GeneratedToken> tokens;
    // All steps that the hops at a place of the route took, in all epochs.
    std::vector<std::vector<ControlledEngine::StepShape>> steps;
    std::vector<std::vector<uint32_t>> resumed_at;  // per repair
};

Answer undisturbed(const RepairCase & repair_case);
Answer repaired(const RepairCase & repair_case, const std::vector<Interruption> & interruptions);

// Bit-equal tokens and log-probabilities, and no step that the undisturbed run did not take in the very same shape.
void expect_equal(const Answer & repaired, const Answer & undisturbed);

}  // namespace meshnet::test
