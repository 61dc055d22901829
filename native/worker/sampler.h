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

class Sampler {
  public:
    // `params` must have passed FrameRules::check_sampling. `token_capacity` is what a penalty window of -1 means.
    Sampler(const v1::SamplingParams & params, uint32_t n_vocab, uint32_t token_capacity);

    // A copy with the same state: penalty window and random numbers to come.
    Sampler(const Sampler & other);
    Sampler & operator=(const Sampler &) = delete;

    // A token has passed (prompt, or sampled before): enters the penalty window.
    void accept(int32_t token);
    // Forgets all accepted tokens and accepts these instead; random numbers go on.
    void reset_window(const std::vector<int32_t> & tokens);

    // Samples from `n_vocab` raw logits and fills token and log-probabilities (taken before bias, penalties,
    // temperature and truncation). Does not accept the token. False if the logits have no finite maximum or a NaN.
    bool sample(const std::vector<float> & logits, v1::GeneratedToken & out);

  private:
    struct Free {
        void operator()(llama_sampler * sampler) const;
    };

    uint32_t n_logprobs_ = 0;  // SamplingParams.logprobs
    bool plain_greedy_ = false;
    llama_sampler * penalties_ = nullptr;  // owned by chain_
    std::unique_ptr<llama_sampler, Free> chain_;
};

}  // namespace meshnet
