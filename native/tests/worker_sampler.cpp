// The sampler chain at the tail.
#include "worker/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

namespace meshnet {
namespace {

const std::vector<float> logits = {0.5f, 2.0f, 1.0f, -1.0f, 1.9f};

uint32_t sample(Sampler & sampler, const std::vector<float> & from = logits, uint32_t position = 0) {
    v1::GeneratedToken token;
    EXPECT_TRUE(sampler.sample(from, position, token));
    EXPECT_EQ(token.position(), position);
    return token.token();
}

std::vector<uint32_t> draw(Sampler & sampler, uint32_t n, uint32_t position = 0) {
    std::vector<uint32_t> tokens;
    for (uint32_t i = 0; i < n; ++i) {
        tokens.push_back(sample(sampler, logits, position + i));
        sampler.accept(static_cast<int32_t>(tokens.back()));
    }
    return tokens;
}

v1::SamplingParams with_temperature(float temperature, uint32_t seed = 1) {
    v1::SamplingParams params;
    params.set_temperature(temperature);
    params.set_seed(seed);
    return params;
}

TEST(Sampler, GreedyTakesTheFirstMaximum) {
    Sampler sampler({}, 5, 100);
    EXPECT_EQ(sample(sampler), 1U);
    EXPECT_EQ(sample(sampler, {3.0f, 3.0f, 1.0f, 0.0f, 0.0f}), 0U);
}

TEST(Sampler, GreedyStillAppliesBiasAndPenalties) {
    v1::SamplingParams params;
    (*params.mutable_logit_bias())[3] = 10.0f;
    Sampler biased(params, 5, 100);
    EXPECT_EQ(sample(biased), 3U);

    params.Clear();
    params.set_penalty_last_n(-1);
    params.set_presence_penalty(0.5f);
    Sampler penalized(params, 5, 100);
    EXPECT_EQ(sample(penalized), 1U);
    penalized.accept(1);
    EXPECT_EQ(sample(penalized), 4U);
    penalized.accept(4);
    EXPECT_EQ(sample(penalized), 1U);

    params.Clear();
    params.set_penalty_last_n(1);
    params.set_repeat_penalty(2.0f);
    Sampler repeat(params, 5, 100);
    repeat.accept(1);
    EXPECT_EQ(sample(repeat), 4U);
    repeat.accept(0);
    EXPECT_EQ(sample(repeat), 1U) << "token 1 has left the window";
}

TEST(Sampler, PenaltiesAreOffWithoutAWindow) {
    v1::SamplingParams params;
    params.set_presence_penalty(5.0f);
    Sampler sampler(params, 5, 100);
    sampler.accept(1);
    EXPECT_EQ(sample(sampler), 1U);
}

TEST(Sampler, SeedsAreReproducible) {
    for (const uint32_t seed : {0U, 7U, std::numeric_limits<uint32_t>::max()}) {
        Sampler first(with_temperature(1.0f, seed), 5, 100);
        Sampler second(with_temperature(1.0f, seed), 5, 100);
        EXPECT_EQ(draw(first, 50), draw(second, 50)) << seed;
    }
    Sampler first(with_temperature(1.0f, 7), 5, 100);
    Sampler other(with_temperature(1.0f, 8), 5, 100);
    EXPECT_NE(draw(first, 50), draw(other, 50));
}

TEST(Sampler, TruncationKeepsWhatItSays) {
    const auto seen = [](const v1::SamplingParams & params) {
        Sampler sampler(params, 5, 100);
        const auto tokens = draw(sampler, 400);
        return std::set<uint32_t>(tokens.begin(), tokens.end());
    };
    auto params = with_temperature(1.0f);
    EXPECT_EQ(seen(params), (std::set<uint32_t>{0, 1, 2, 3, 4}));
    params.set_top_k(2);
    EXPECT_EQ(seen(params), (std::set<uint32_t>{1, 4}));
    params = with_temperature(1.0f);
    params.set_top_p(0.6f);
    EXPECT_EQ(seen(params), (std::set<uint32_t>{1, 4}));
    params = with_temperature(1.0f);
    params.set_min_p(0.3f);
    EXPECT_EQ(seen(params), (std::set<uint32_t>{1, 2, 4}));
    params = with_temperature(1.0f);
    params.set_top_p(1.0f);
    params.set_typical_p(1.0f);
    params.set_top_k(1);
    EXPECT_EQ(seen(params), (std::set<uint32_t>{1}));
}

TEST(Sampler, SamplesTheSoftmaxDistribution) {
    Sampler sampler(with_temperature(0.7f, 3), 5, 100);
    std::map<uint32_t, int> counts;
    constexpr int n = 20'000;
    for (const uint32_t token : draw(sampler, n)) {
        ++counts[token];
    }
    double sum = 0.0;
    for (const float logit : logits) {
        sum += std::exp(logit / 0.7);
    }
    for (uint32_t token = 0; token < logits.size(); ++token) {
        EXPECT_NEAR(counts[token], n * std::exp(logits[token] / 0.7) / sum, 0.02 * n) << token;
    }
}

TEST(Sampler, LogprobsAreOfTheRawLogits) {
    double sum = 0.0;
    for (const float logit : logits) {
        sum += std::exp(static_cast<double>(logit));
    }
    auto params = with_temperature(0.1f);
    params.set_logprobs(1 + 3);
    (*params.mutable_logit_bias())[3] = 50.0f;
    Sampler sampler(params, 5, 100);
    v1::GeneratedToken token;
    ASSERT_TRUE(sampler.sample(logits, 0, token));
    EXPECT_EQ(token.token(), 3U);
    ASSERT_TRUE(token.has_logprob());
    EXPECT_NEAR(token.logprob(), -1.0 - std::log(sum), 1e-6);
    ASSERT_EQ(token.top_size(), 3);
    EXPECT_EQ(token.top(0).token(), 1U);
    EXPECT_EQ(token.top(1).token(), 4U);
    EXPECT_EQ(token.top(2).token(), 2U);
    EXPECT_NEAR(token.top(0).logprob(), 2.0 - std::log(sum), 1e-6);

    params.set_logprobs(1);
    Sampler alone(params, 5, 100);
    v1::GeneratedToken only;
    ASSERT_TRUE(alone.sample(logits, 0, only));
    EXPECT_TRUE(only.has_logprob());
    EXPECT_EQ(only.top_size(), 0);
    params.set_logprobs(21);
    Sampler all(params, 5, 100);
    v1::GeneratedToken many;
    ASSERT_TRUE(all.sample(logits, 0, many));
    EXPECT_EQ(many.top_size(), 5) << "no more than the vocabulary";
}

TEST(Sampler, SeedsAreMixedAsTheWireSays) {
    // Reference values, computed from the definition in shard.proto.
    EXPECT_EQ(draw_seed(0x0, 0x0), 0xe220a839U);
    EXPECT_EQ(draw_seed(0x0, 0x1), 0x910a2decU);
    EXPECT_EQ(draw_seed(0x7, 0x29), 0xc54441baU);
    EXPECT_EQ(draw_seed(0xffffffff, 0x0), 0x219fc13dU);
    EXPECT_EQ(draw_seed(0xffffffff, 0xffffffff), 0xe4d97177U);
}

TEST(Sampler, DrawsAsTheWireSays) {
    // Uniform over four tokens: the token is the quarter that the uniform number lies in.
    constexpr uint32_t seed = 9;
    Sampler sampler(with_temperature(1.0f, seed), 4, 100);
    for (uint32_t position = 0; position < 200; ++position) {
        std::mt19937 random(draw_seed(seed, position));
        const uint64_t a = random();
        const uint64_t b = random();
        const double u = (static_cast<double>(a) + static_cast<double>(b) * 0x1p32) * 0x1p-64;
        EXPECT_EQ(sample(sampler, {1.0f, 1.0f, 1.0f, 1.0f}, position), static_cast<uint32_t>(u * 4)) << position;
    }
}

TEST(Sampler, ADrawDependsOnSeedAndPositionAlone) {
    Sampler sampler(with_temperature(1.0f, 5), 5, 100);
    const auto forwards = draw(sampler, 100);
    Sampler other(with_temperature(1.0f, 5), 5, 100);
    for (uint32_t position = 100; position-- > 0;) {
        EXPECT_EQ(sample(other, logits, position), forwards[position]);
    }
    EXPECT_NE(draw(sampler, 100, 100), forwards) << "positions differ";
}

TEST(Sampler, OneRebuiltInMidStreamGoesOnAlike) {
    for (const int32_t window : {0, 1, 8, 64, -1}) {
        for (const float temperature : {0.0f, 1.0f}) {
            auto params = with_temperature(temperature, 5);
            params.set_penalty_last_n(window);
            params.set_frequency_penalty(0.4f);
            params.set_repeat_penalty(1.1f);
            Sampler sampler(params, 5, 100);
            std::vector<int32_t> history = {3, 3, 0, 4, 1, 2, 2, 1, 0, 4};
            sampler.reset_window(history);
            const auto undisturbed = draw(sampler, 60, 10);
            for (const size_t n : {1, 2, 30, 59}) {
                std::vector<int32_t> so_far = history;
                so_far.insert(so_far.end(), undisturbed.begin(), undisturbed.begin() + static_cast<std::ptrdiff_t>(n));
                // A new tail: part of the history is replayed step by step.
                Sampler rebuilt(params, 5, 100);
                rebuilt.reset_window({so_far.begin(), so_far.begin() + 7});
                for (size_t i = 7; i < so_far.size(); ++i) {
                    rebuilt.accept(so_far[i]);
                }
                const auto rest = draw(rebuilt, static_cast<uint32_t>(60 - n), static_cast<uint32_t>(10 + n));
                EXPECT_EQ(rest, std::vector<uint32_t>(undisturbed.begin() + static_cast<std::ptrdiff_t>(n),
                                                      undisturbed.end()))
                    << "after " << n << " tokens, window " << window;
            }
        }
    }
}

TEST(Sampler, ACopyContinuesWhereTheOriginalWas) {
    auto params = with_temperature(1.0f, 5);
    params.set_penalty_last_n(8);
    params.set_frequency_penalty(0.4f);
    Sampler sampler(params, 5, 100);
    draw(sampler, 10);
    Sampler copy(sampler);
    const auto expected = draw(sampler, 30, 10);
    EXPECT_EQ(draw(copy, 30, 10), expected);
}

TEST(Sampler, TheWindowCanBeRebuilt) {
    v1::SamplingParams params;
    params.set_penalty_last_n(-1);
    params.set_presence_penalty(0.5f);
    Sampler sampler(params, 5, 100);
    sampler.accept(1);
    EXPECT_EQ(sample(sampler), 4U);
    sampler.reset_window({});
    EXPECT_EQ(sample(sampler), 1U);
    sampler.reset_window({4, 1});
    EXPECT_EQ(sample(sampler), 1U);
}

TEST(Sampler, LogitsThatAreNotFiniteAreAnError) {
    const float inf = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const auto & params : {v1::SamplingParams(), with_temperature(1.0f)}) {
        Sampler sampler(params, 3, 100);
        v1::GeneratedToken token;
        EXPECT_FALSE(sampler.sample({1.0f, nan, 2.0f}, 0, token));
        EXPECT_FALSE(sampler.sample({nan, 1.0f, 2.0f}, 0, token));
        EXPECT_FALSE(sampler.sample({1.0f, inf, 2.0f}, 0, token));
        EXPECT_FALSE(sampler.sample({-inf, -inf, -inf}, 0, token));
        EXPECT_FALSE(sampler.sample({}, 0, token));
        EXPECT_TRUE(sampler.sample({-inf, 1.0f, -inf}, 0, token));
        EXPECT_EQ(token.token(), 1U);
    }
}

}  // namespace
}  // namespace meshnet
