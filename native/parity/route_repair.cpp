// Workers that compute with the llama engine: a generation that goes on over a repaired route has the tokens and the
// log-probabilities of one that nothing disturbed, bit for bit.
#include "parity/engine_fixture.h"
#include "tests/repair_support.h"

namespace meshnet::parity {
namespace {

constexpr uint32_t n_prompt = 75;
constexpr uint32_t n_new = 20;

class Repair : public testing::TestWithParam<std::string> {
  protected:
    // A route of three shards where the model has that many.
    void SetUp() override {
        EngineConfig config = tiny_config(GetParam());
        config.session_tokens = 256;
        config.step_tokens = 64;
        config.sequences = 2;
        Route whole;
        ASSERT_OK(whole.load(config, {}));
        const auto & description = describe(whole);
        const auto cuts = some_cuts(whole, 2);
        ASSERT_FALSE(cuts.empty());
        c_.n_hops = cuts.size() + 1;
        c_.can_rollback = description.can_rollback;
        c_.chunk_tokens = 16;
        c_.n_new = n_new;
        c_.sampling.set_logprobs(1 + 5);
        for (const int32_t token : make_prompt(*whole.engines().front(), n_prompt, 1)) {
            c_.prompt.push_back(static_cast<uint32_t>(token));
        }
        c_.make_hop = [config, cuts](size_t hop) {
            EngineConfig ranged = config;
            ranged.layers.start = hop == 0 ? 0 : static_cast<int32_t>(cuts[hop - 1]);
            ranged.layers.end = hop < cuts.size() ? static_cast<int32_t>(cuts[hop]) : 0;
            std::unique_ptr<ShardEngine> engine;
            if (const Status status = make_llama_engine(ranged, engine); !status.ok()) {
                throw std::runtime_error(status.message);
            }
            WorkerOptions options;
            options.orphan_timeout_ms = 600'000;  // a replacement may take long to load
            return std::make_unique<test::Hop>(std::move(engine), options);
        };
    }

    // Loses one hop, at a moment given as steps of the tail.
    void check(const std::vector<std::pair<size_t, uint32_t>> & losses) {
        const auto expected = test::undisturbed(c_);
        ASSERT_EQ(expected.tokens.size(), n_new);
        for (const auto & [victim, tail_steps] : losses) {
            SCOPED_TRACE("hop " + std::to_string(victim) + " after " + std::to_string(tail_steps) + " steps");
            test::expect_equal(test::repaired(c_, {{victim, tail_steps, false}}), expected);
        }
        SCOPED_TRACE("twice");
        test::expect_equal(
            test::repaired(c_, {{c_.n_hops - 1, c_.chunks() + 7, false}, {c_.n_hops - 2, c_.chunks() + 2, true}}),
            expected);
    }

    test::RepairCase c_;
};

// In prefill, after one token and after many; then a second loss while the route refills.
TEST_P(Repair, Greedy) {
    std::vector<std::pair<size_t, uint32_t>> losses = {{1, c_.chunks()}};
    for (size_t victim = 0; victim < c_.n_hops; ++victim) {
        losses.emplace_back(victim, 2);
        losses.emplace_back(victim, c_.chunks() + 11);
    }
    check(losses);
}

TEST_P(Repair, Seeded) {
    c_.sampling.set_temperature(0.8f);
    c_.sampling.set_seed(4711);
    c_.sampling.set_penalty_last_n(32);
    c_.sampling.set_repeat_penalty(1.1f);
    c_.sampling.set_frequency_penalty(0.2f);
    c_.sampling.set_presence_penalty(0.1f);
    c_.sampling.set_top_p(0.95f);
    check({{0, c_.chunks() + 11}, {c_.n_hops - 1, c_.chunks() + 11}});
}

INSTANTIATE_TEST_SUITE_P(Models, Repair, testing::Values("llama", "deepseek4", "glm-dsa", "qwen35", "qwen35moe"),
                         name_of);

}  // namespace
}  // namespace meshnet::parity
