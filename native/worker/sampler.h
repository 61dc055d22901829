// Chooses the next token from raw logits with llama.cpp's sampler chain.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "meshnet/v1/shard.pb.h"

struct llama_sampler;

namespace meshnet {

// Most `top` entries of a sampled token.
inline constexpr uint32_t max_top_logprobs = 20;

// Seeds the random numbers for the token at `position` (see SamplingParams.seed in shard.proto).
uint32_t draw_seed(uint32_t seed, uint32_t position);

// Its only state is the penalty window: a sampler that has accepted the same tokens draws the same, wherever it is.

class Sampler {
  public:
    // `params` must have passed FrameRules::check_sampling. `token_capacity` is what a penalty window of -1 means.
    Sampler(const v1::SamplingParams & params, uint32_t n_vocab, uint32_t token_capacity);

    // A copy with the same penalty window.
    Sampler(const Sampler & other);
    Sampler & operator=(const Sampler &) = delete;

    // A token has passed (prompt, or sampled before): enters the penalty window.
    void accept(int32_t token);
    // Forgets all accepted tokens and accepts these instead.
    void reset_window(const std::vector<int32_t> & tokens);

    // Samples the token at `position` from `n_vocab` raw logits and fills position, token and log-probabilities (taken
    // before bias, penalties, temperature and truncation). Does not accept the token. False if the logits have no
    // finite maximum or a NaN.
    bool sample(const std::vector<float> & logits, uint32_t position, v1::GeneratedToken & out);

  private:
    struct Free {
        void operator()(llama_sampler * sampler) const;
    };

    uint32_t n_logprobs_ = 0;  // SamplingParams.logprobs
    uint32_t seed_ = 0;
    bool greedy_ = false;                  // takes the most likely token that the chain leaves
    bool plain_greedy_ = false;            // ... and the chain is empty
    llama_sampler * penalties_ = nullptr;  // owned by chain_
    std::unique_ptr<llama_sampler, Free> chain_;
};

}  // namespace meshnet
