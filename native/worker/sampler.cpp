#include "worker/sampler.h"

#include <llama.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "worker/prefix.h"

namespace meshnet {
namespace {

// Below this, dividing by the temperature could overflow; the outcome is greedy long before.
constexpr float min_temperature = 1e-6f;

bool turned_off(float probability) {
    return probability <= 0.0f || probability >= 1.0f;
}

// The first of the largest logits; nothing if there is a NaN or no finite maximum.
std::optional<size_t> argmax(const std::vector<float> & logits) {
    constexpr size_t lanes = 16;
    // Lane by lane, so that the compiler uses vectors: of a large vocabulary this is most of the sampler's time.
    std::array<float, lanes> best;
    best.fill(-std::numeric_limits<float>::infinity());
    std::array<int, lanes> nan{};
    const size_t whole = logits.size() - logits.size() % lanes;
    for (size_t i = 0; i < whole; i += lanes) {
        for (size_t lane = 0; lane < lanes; ++lane) {
            const float logit = logits[i + lane];
            best[lane] = logit > best[lane] ? logit : best[lane];
            nan[lane] |= static_cast<int>(logit != logit);
        }
    }
    for (size_t i = whole; i < logits.size(); ++i) {
        best[0] = std::max(best[0], logits[i]);
        nan[0] |= static_cast<int>(logits[i] != logits[i]);
    }
    const float max = *std::max_element(best.begin(), best.end());
    if (!std::isfinite(max) || std::any_of(nan.begin(), nan.end(), [](int is) { return is != 0; })) {
        return std::nullopt;
    }
    return static_cast<size_t>(std::find(logits.begin(), logits.end(), max) - logits.begin());
}

void put_logprobs(const std::vector<float> & logits, float max_logit, uint32_t n_top, v1::GeneratedToken & out) {
    double sum = 0.0;
    for (const float logit : logits) {
        sum += std::exp(static_cast<double>(logit) - max_logit);
    }
    const double log_sum = max_logit + std::log(sum);
    out.set_has_logprob(true);
    out.set_logprob(static_cast<float>(logits[out.token()] - log_sum));
    if (n_top == 0) {
        return;
    }
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const size_t n = std::min<size_t>(n_top, order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n), order.end(),
                      [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    for (size_t i = 0; i < n; ++i) {
        auto * top = out.add_top();
        top->set_token(static_cast<uint32_t>(order[i]));
        top->set_logprob(static_cast<float>(logits[order[i]] - log_sum));
    }
}

}  // namespace

uint32_t draw_seed(uint32_t seed, uint32_t position) {
    const auto mixed = static_cast<uint32_t>(splitmix64_mix(((uint64_t{seed} << 32) | position) + golden_ratio) >> 32);
    // llama.cpp takes this one as "choose a seed at random".
    return mixed == LLAMA_DEFAULT_SEED ? mixed - 1 : mixed;
}

void Sampler::Free::operator()(llama_sampler * sampler) const {
    llama_sampler_free(sampler);
}

Sampler::Sampler(const v1::SamplingParams & params, uint32_t n_vocab, uint32_t token_capacity)
    : n_logprobs_(params.logprobs()), seed_(params.seed()),
      chain_(llama_sampler_chain_init(llama_sampler_chain_default_params())) {
    auto * chain = chain_.get();
    std::vector<llama_logit_bias> bias;
    for (const auto & [token, value] : params.logit_bias()) {
        bias.push_back({static_cast<llama_token>(token), value});
    }
    if (!bias.empty()) {
        llama_sampler_chain_add(chain, llama_sampler_init_logit_bias(static_cast<int32_t>(n_vocab),
                                                                     static_cast<int32_t>(bias.size()), bias.data()));
    }
    const int32_t window = params.penalty_last_n() < 0
                               ? static_cast<int32_t>(token_capacity)
                               : std::min(params.penalty_last_n(), static_cast<int32_t>(token_capacity));
    const float repeat = params.repeat_penalty() == 0.0f ? 1.0f : params.repeat_penalty();
    if (window > 0 && (repeat != 1.0f || params.frequency_penalty() != 0.0f || params.presence_penalty() != 0.0f)) {
        penalties_ = llama_sampler_init_penalties(static_cast<int32_t>(n_vocab), window, repeat,
                                                  params.frequency_penalty(), params.presence_penalty());
        llama_sampler_chain_add(chain, penalties_);
    }
    if (params.temperature() < min_temperature) {
        greedy_ = true;
        plain_greedy_ = bias.empty() && penalties_ == nullptr;
        llama_sampler_chain_add(chain, llama_sampler_init_greedy());
        return;
    }
    if (params.top_k() > 0) {
        const uint32_t top_k = std::min(params.top_k(), n_vocab);
        llama_sampler_chain_add(chain, llama_sampler_init_top_k(static_cast<int32_t>(top_k)));
    }
    if (!turned_off(params.typical_p())) {
        llama_sampler_chain_add(chain, llama_sampler_init_typical(params.typical_p(), 1));
    }
    if (!turned_off(params.top_p())) {
        llama_sampler_chain_add(chain, llama_sampler_init_top_p(params.top_p(), 1));
    }
    if (params.min_p() > 0.0f) {
        llama_sampler_chain_add(chain, llama_sampler_init_min_p(params.min_p(), 1));
    }
    llama_sampler_chain_add(chain, llama_sampler_init_temp(params.temperature()));
}

Sampler::Sampler(const Sampler & other)
    : n_logprobs_(other.n_logprobs_), seed_(other.seed_), greedy_(other.greedy_), plain_greedy_(other.plain_greedy_),
      chain_(llama_sampler_clone(other.chain_.get())) {
    for (int32_t i = 0; i < llama_sampler_chain_n(chain_.get()); ++i) {
        if (llama_sampler_chain_get(other.chain_.get(), i) == other.penalties_) {
            penalties_ = llama_sampler_chain_get(chain_.get(), i);
        }
    }
}

void Sampler::accept(int32_t token) {
    if (penalties_ != nullptr) {
        llama_sampler_accept(penalties_, token);
    }
}

void Sampler::reset_window(const std::vector<int32_t> & tokens) {
    if (penalties_ == nullptr) {
        return;
    }
    llama_sampler_reset(penalties_);
    for (const int32_t token : tokens) {
        llama_sampler_accept(penalties_, token);
    }
}

bool Sampler::sample(const std::vector<float> & logits, uint32_t position, v1::GeneratedToken & out) {
    const auto best = argmax(logits);
    if (!best.has_value()) {
        return false;
    }
    size_t token = *best;
    if (!plain_greedy_) {
        std::vector<llama_token_data> candidates(logits.size());
        for (size_t i = 0; i < logits.size(); ++i) {
            candidates[i] = {static_cast<llama_token>(i), logits[i], 0.0f};
        }
        llama_token_data_array array = {candidates.data(), candidates.size(), -1, false};
        llama_sampler_apply(chain_.get(), &array);
        if (!greedy_) {
            const std::unique_ptr<llama_sampler, Free> draw(llama_sampler_init_dist(draw_seed(seed_, position)));
            llama_sampler_apply(draw.get(), &array);
        }
        if (array.selected < 0 || static_cast<size_t>(array.selected) >= array.size) {
            return false;
        }
        token = static_cast<size_t>(array.data[array.selected].id);
    }
    out.set_position(position);
    out.set_token(static_cast<uint32_t>(token));
    if (n_logprobs_ > 0) {
        put_logprobs(logits, logits[*best], n_logprobs_ - 1, out);
    }
    return true;
}

}  // namespace meshnet
