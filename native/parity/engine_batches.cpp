// Several sessions on one route: together in one batch, in turns, and one after the other in the same slot.
#include <limits>

#include "parity/engine_fixture.h"

namespace meshnet::parity {
namespace {

class Batches : public testing::TestWithParam<std::string> {
  protected:
    void SetUp() override {
        ASSERT_OK(whole_.load(tiny_config(GetParam()), {}));
        ASSERT_OK(split_.load(tiny_config(GetParam()), some_cuts(whole_, 2)));
        ASSERT_EQ(split_.engines().size(), 3U);
    }

    std::vector<int32_t> tokens(uint32_t n, uint32_t seed) const {
        return make_prompt(*whole_.engines().front(), n, seed);
    }

    // The same batches on both routes; every row of logits must be equal.
    void run_both(const std::vector<Route::Work> & batch) {
        std::vector<Logits> expected;
        std::vector<Logits> found;
        ASSERT_OK(whole_.run(batch, expected));
        ASSERT_OK(split_.run(batch, found));
        for (size_t i = 0; i < batch.size(); ++i) {
            ASSERT_EQ(expected[i].empty(), !batch[i].want_logits);
            EXPECT_TRUE(bit_equal(expected[i], found[i])) << "part " << i << " of the batch";
        }
    }

    // Rows of one session's steps, in a session of its own.
    void alone(Route & route, const std::vector<std::vector<int32_t>> & steps, std::vector<Logits> & rows) {
        size_t session = 0;
        ASSERT_OK(route.open(session));
        for (const auto & step : steps) {
            rows.emplace_back();
            ASSERT_OK(route.run(session, step, rows.back()));
        }
        ASSERT_OK(route.close(session));
    }

    Route whole_;
    Route split_;
};

TEST_P(Batches, SessionsInOneBatchEqualTheWholeModel) {
    size_t session = 0;
    for (int i = 0; i < 3; ++i) {
        ASSERT_OK(whole_.open(session));
        ASSERT_OK(split_.open(session));
    }
    // Prefill of different lengths together, a prefill beside decode steps, then decode steps of all.
    run_both({{0, tokens(200, 1), false}, {1, tokens(33, 2), true}});
    run_both({{0, tokens(211, 3), true}, {1, tokens(1, 4), true}});
    run_both({{1, tokens(1, 5), true}, {2, tokens(300, 6), true}, {0, tokens(1, 7), true}});
    for (uint32_t i = 0; i < 8; ++i) {
        run_both({{0, tokens(1, 100 + i), true}, {1, tokens(1, 200 + i), true}, {2, tokens(1, 300 + i), true}});
    }
    run_both({{2, tokens(5, 8), true}, {0, tokens(64, 9), true}});
}

TEST_P(Batches, SessionsInTurnsEqualEachAlone) {
    constexpr size_t n_sessions = 3;
    std::vector<std::vector<std::vector<int32_t>>> steps(n_sessions);
    std::vector<std::vector<Logits>> expected(n_sessions);
    for (uint32_t s = 0; s < n_sessions; ++s) {
        steps[s] = {tokens(100 + 80 * s, s), tokens(50, 10 + s)};
        for (uint32_t i = 0; i < 6; ++i) {
            steps[s].push_back(tokens(1, 100 * s + i));
        }
        alone(whole_, steps[s], expected[s]);
    }
    size_t session[n_sessions] = {};
    for (size_t & s : session) {
        ASSERT_OK(split_.open(s));
    }
    for (size_t i = 0; i < steps[0].size(); ++i) {
        for (size_t s = 0; s < n_sessions; ++s) {
            Logits row;
            ASSERT_OK(split_.run(session[s], steps[s][i], row));
            EXPECT_TRUE(bit_equal(row, expected[s][i])) << "session " << s << ", step " << i;
        }
    }
}

// Nothing of a closed session is left in its slot.
TEST_P(Batches, ASlotTakenAgainIsLikeNew) {
    const std::vector<std::vector<int32_t>> steps = {tokens(300, 1), tokens(1, 2), tokens(1, 3)};
    std::vector<Logits> expected;
    alone(split_, steps, expected);
    std::vector<Logits> other;
    alone(split_, {tokens(400, 7), tokens(1, 8)}, other);
    std::vector<Logits> again;
    alone(split_, steps, again);
    for (size_t i = 0; i < steps.size(); ++i) {
        EXPECT_TRUE(bit_equal(expected[i], again[i])) << "step " << i;
    }
    EXPECT_FALSE(bit_equal(expected.front(), other.front()));
}

// Split is whole under other settings of the engine, too.
TEST_P(Batches, OtherSettings) {
    std::vector<EngineConfig> configs(3, tiny_config(GetParam()));
    configs[0].most_copied_bytes = std::numeric_limits<uint64_t>::max();
    configs[1].kv_type_k = "q8_0";
    configs[1].kv_type_v = "q8_0";
    configs[2].flash_attention = false;
    Generation generation;
    generation.prompt = tokens(150, 1);
    generation.chunk = 64;
    generation.n_new = 6;
    for (const EngineConfig & config : configs) {
        SCOPED_TRACE("setting " + std::to_string(&config - configs.data()));
        ASSERT_OK(split_.load(config, some_cuts(whole_, 2)));
        ASSERT_OK(whole_.load(config, {}));
        Trace expected;
        Trace found;
        ASSERT_OK(generate(whole_, generation, expected));
        ASSERT_OK(generate(split_, generation, found));
        EXPECT_EQ(first_difference(expected, found), -1);
    }
}

// Weights are copied where they fit, and else left in the file.
TEST_P(Batches, CopiesAsMuchAsItMay) {
    EngineConfig config = tiny_config(GetParam());
    ASSERT_OK(whole_.load(config, {}));
    const uint64_t weight_bytes = describe(whole_).weight_bytes;
    EXPECT_LT(describe(whole_).copied_bytes, weight_bytes);
    config.most_copied_bytes = weight_bytes - 1;
    ASSERT_OK(whole_.load(config, {}));
    EXPECT_LT(describe(whole_).copied_bytes, weight_bytes);
    config.most_copied_bytes = weight_bytes;
    ASSERT_OK(whole_.load(config, {}));
    EXPECT_GE(describe(whole_).copied_bytes, weight_bytes);
}

INSTANTIATE_TEST_SUITE_P(Models, Batches, testing::Values("llama", "deepseek4", "glm-dsa", "qwen35", "qwen35moe"),
                         name_of);

}  // namespace
}  // namespace meshnet::parity
