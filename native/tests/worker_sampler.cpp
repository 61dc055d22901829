// The sampler chain at the tail.
#include "worker/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

namespace meshnet {
namespace {

const std::vector<float> logits = {0.5f, 2.0f, 1.0f, -1.0f, 1.9f};

uint32_t sample(Sampler & sampler, const std::vector<float> & from = logits) {
    v1::GeneratedToken token;
    EXPECT_TRUE(sampler.sample(from, token));
    return token.token();
}

std::vector<uint32_t> draw(Sampler & sampler, int n) {
    std::vector<uint32_t> tokens;
    for (int i = 0; i < n; ++i) {
        tokens.push_back(sample(sampler));
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
    ASSERT_TRUE(sampler.sample(logits, token));
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
    ASSERT_TRUE(alone.sample(logits, only));
    EXPECT_TRUE(only.has_logprob());
    EXPECT_EQ(only.top_size(), 0);
    params.set_logprobs(21);
    Sampler all(params, 5, 100);
    v1::GeneratedToken many;
    ASSERT_TRUE(all.sample(logits, many));
    EXPECT_EQ(many.top_size(), 5) << "no more than the vocabulary";
}

TEST(Sampler, ACopyContinuesWhereTheOriginalWas) {
    auto params = with_temperature(1.0f, 5);
    params.set_penalty_last_n(8);
    params.set_frequency_penalty(0.4f);
    Sampler sampler(params, 5, 100);
    draw(sampler, 10);
    Sampler copy(sampler);
    const auto expected = draw(sampler, 30);
    EXPECT_EQ(draw(copy, 30), expected);
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
        EXPECT_FALSE(sampler.sample({1.0f, nan, 2.0f}, token));
        EXPECT_FALSE(sampler.sample({nan, 1.0f, 2.0f}, token));
        EXPECT_FALSE(sampler.sample({1.0f, inf, 2.0f}, token));
        EXPECT_FALSE(sampler.sample({-inf, -inf, -inf}, token));
        EXPECT_FALSE(sampler.sample({}, token));
        EXPECT_TRUE(sampler.sample({-inf, 1.0f, -inf}, token));
        EXPECT_EQ(token.token(), 1U);
    }
}

}  // namespace
}  // namespace meshnet
