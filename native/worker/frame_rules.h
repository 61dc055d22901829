// What a well-formed message for this worker looks like. Everything a peer sends is checked here before it can reach
// the engine, which may abort on bad input.
#pragma once

#include <cstdint>

#include "engine/shard_engine.h"
#include "meshnet/v1/shard.pb.h"
#include "worker/refusal.h"

namespace meshnet {

// Most bytes of one message.
inline constexpr uint64_t max_message_bytes = 64ULL << 20;
// Most tokens of one session, whatever a worker could hold.
inline constexpr uint32_t max_session_tokens = 131072;

class FrameRules {
  public:
    // `description` must outlive the rules.
    explicit FrameRules(const EngineDescription & description);

    // Most tokens of one step: the engine's limit, reduced so that a frame in or out, here or at a cut, fits a message.
    uint32_t max_step_tokens() const {
        return max_step_tokens_;
    }

    Refusal check_token(uint32_t token) const;
    // Everything about a step that does not depend on its session.
    Refusal check_step(const v1::StepFrame & frame) const;
    Refusal check_sampling(const v1::SamplingParams & params) const;
    // What a generation says about its tokens that does not depend on its session; chunk_tokens may be 0.
    Refusal check_tokens(const v1::GenerateRequest & request) const;
    // Where the hops of a repaired route resume; `request` has passed check_tokens, chunk_tokens is set.
    static Refusal check_resume(const v1::GenerateRequest & request, uint32_t n_hops);
    // The same in the first frame of a generation that comes to hop `hop_index`; other frames have no resume_at.
    static Refusal check_resume(const v1::StepFrame & frame, uint32_t hop_index, uint32_t n_hops);

  private:
    Refusal check_boundary(const v1::StepFrame & frame) const;

    const EngineDescription & description_;
    uint32_t max_step_tokens_;
};

}  // namespace meshnet
