// Parts of a range: engines over one file at once, of layers that overlap, and what a range tells of its cuts.
#include "parity/engine_fixture.h"

namespace meshnet::parity {
namespace {

class Parts : public testing::TestWithParam<std::string> {
  protected:
    void SetUp() override {
        ASSERT_OK(whole_.load(tiny_config(GetParam()), {}));
        cuts_ = some_cuts(whole_, 3);
        ASSERT_GE(cuts_.size(), 2U);
        ASSERT_TRUE(std::is_sorted(cuts_.begin(), cuts_.end()));
    }

    Route whole_;
    std::vector<uint32_t> cuts_;
};

// Shards [0, last) and [first, n), and for each cut the parts of them that meet there: all of them in turns.
TEST_P(Parts, OverlappingRangesInTurnsEqualTheWholeModel) {
    EngineConfig config = tiny_config(GetParam());
    std::vector<Route> routes(cuts_.size() + 1);
    for (size_t i = 0; i < cuts_.size(); ++i) {
        config.find_cuts = i == 0 || i + 1 == cuts_.size();
        ASSERT_OK(routes[i].load(config, {cuts_[i]}));
    }
    config.find_cuts = false;
    ASSERT_OK(routes.back().load(config, {cuts_.front(), cuts_.back()}));
    size_t session = 0;
    ASSERT_OK(whole_.open(session));
    for (auto & route : routes) {
        ASSERT_OK(route.open(session));
    }
    for (const uint32_t n : {200U, 33U, 1U, 1U, 1U, 64U, 1U}) {
        const auto tokens = make_prompt(*whole_.engines().front(), n, n);
        Logits expected;
        ASSERT_OK(whole_.run(session, tokens, expected));
        for (auto & route : routes) {
            Logits found;
            ASSERT_OK(route.run(session, tokens, found));
            EXPECT_TRUE(bit_equal(expected, found)) << "route " << &route - routes.data() << ", " << n << " tokens";
        }
    }
}

TEST_P(Parts, ARangeTellsWhatCrossesItsCuts) {
    EngineConfig config = tiny_config(GetParam());
    Route upper;
    Route lower;
    ASSERT_OK(upper.load(config, {cuts_.front()}));
    ASSERT_OK(lower.load(config, {cuts_.back()}));
    const auto & tail = upper.engines().back()->describe();
    const auto & head = lower.engines().front()->describe();
    ASSERT_EQ(describe(whole_).cut_boundaries.size(), describe(whole_).legal_cuts.size());
    config.find_cuts = false;
    for (const uint32_t cut : describe(whole_).legal_cuts) {
        const auto layer = static_cast<int32_t>(cut);
        Route parts;
        ASSERT_OK(parts.load(config, {cut}));
        const auto & crossing = parts.engines().front()->describe().boundary_out;
        EXPECT_FALSE(crossing.tensors.empty());
        ASSERT_NE(describe(whole_).boundary_at(layer), nullptr);
        EXPECT_EQ(describe(whole_).boundary_at(layer)->digest(), crossing.digest());
        for (const EngineDescription * range : {&head, &tail}) {
            if (layer < range->layers.start || layer > range->layers.end) {
                EXPECT_EQ(range->boundary_at(layer), nullptr);
            } else {
                ASSERT_NE(range->boundary_at(layer), nullptr);
                EXPECT_EQ(range->boundary_at(layer)->digest(), crossing.digest());
            }
        }
        EXPECT_TRUE(parts.engines().front()->describe().legal_cuts.empty());
        EXPECT_LE(parts.engines().front()->describe().kv_bytes, describe(whole_).kv_bytes);
    }
    for (const auto & [cut, reason] : describe(whole_).illegal_cuts) {
        EXPECT_EQ(describe(whole_).boundary_at(static_cast<int32_t>(cut)), nullptr);
        EXPECT_FALSE(reason.empty());
    }
}

INSTANTIATE_TEST_SUITE_P(Models, Parts, testing::Values("llama", "deepseek4", "glm-dsa", "qwen35", "qwen35moe"),
                         name_of);

}  // namespace
}  // namespace meshnet::parity
