// Rolling a session back: afterwards it is bit for bit a session that never went further, or it is refused and the
// session is as it was.
#include <map>

#include "parity/engine_fixture.h"

namespace meshnet::parity {
namespace {

struct Setting {
    std::string architecture;
    uint32_t rollback_tokens;  // snapshots of recurrent state
    bool split;
};

std::string setting_name(const testing::TestParamInfo<Setting> & info) {
    std::string name = info.param.architecture + "_" + std::to_string(info.param.rollback_tokens) + "_" +
                       (info.param.split ? "split" : "whole");
    name.erase(std::remove(name.begin(), name.end(), '-'), name.end());
    return name;
}

void PrintTo(const Setting & setting, std::ostream * out) {
    *out << setting.architecture << " with " << setting.rollback_tokens << " snapshots";
}

using Steps = std::vector<std::vector<int32_t>>;

Steps operator+(Steps a, const Steps & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

uint32_t count(const Steps & steps) {
    uint32_t n = 0;
    for (const auto & step : steps) {
        n += static_cast<uint32_t>(step.size());
    }
    return n;
}

class Rollback : public testing::TestWithParam<Setting> {
  protected:
    void SetUp() override {
        const Setting & setting = GetParam();
        auto & route = routes_[{setting.architecture, {setting.rollback_tokens, setting.split}}];
        if (!route) {
            EngineConfig config = tiny_config(setting.architecture);
            config.rollback_tokens = setting.rollback_tokens;
            Route whole;
            ASSERT_OK(whole.load(config, {}));
            auto loaded = std::make_shared<Route>();
            ASSERT_OK(loaded->load(config, setting.split ? some_cuts(whole, 1) : std::vector<uint32_t>()));
            route = std::move(loaded);
        }
        route_ = route;
    }

    std::vector<int32_t> tokens(uint32_t n, uint32_t seed) const {
        return make_prompt(*route_->engines().front(), n, seed);
    }

    // One token a step.
    Steps decode(uint32_t n, uint32_t seed) const {
        Steps steps;
        for (const int32_t token : tokens(n, seed)) {
            steps.push_back({token});
        }
        return steps;
    }

    bool can_rollback() const {
        return describe(*route_).can_rollback;
    }

    bool has_snapshots() const {
        return GetParam().rollback_tokens > 0 && GetParam().architecture != "llama" &&
               GetParam().architecture != "glm-dsa";
    }

    std::vector<Logits> run(size_t session, const Steps & steps) {
        std::vector<Logits> rows;
        for (const auto & step : steps) {
            rows.emplace_back();
            const Status status = route_->run(session, step, rows.back());
            EXPECT_TRUE(status.ok()) << status.message;
        }
        return rows;
    }

    // Rows of `next` in a session that does nothing but `kept` before.
    std::vector<Logits> fresh(const Steps & kept, const Steps & next) {
        size_t session = 0;
        EXPECT_TRUE(route_->open(session).ok());
        run(session, kept);
        std::vector<Logits> rows = run(session, next);
        EXPECT_TRUE(route_->close(session).ok());
        return rows;
    }

    // Runs `steps`, rolls back to `position` and goes on with `next`, wherever that leads from.
    std::vector<Logits> after_rollback(const Steps & steps, uint32_t position, const Steps & next, bool & rolled_back) {
        size_t session = 0;
        EXPECT_TRUE(route_->open(session).ok());
        run(session, steps);
        const Status status = route_->rollback(session, position);
        rolled_back = status.ok();
        EXPECT_TRUE(rolled_back || status.code == Code::no_rollback) << status.message;
        std::vector<Logits> rows = run(session, next);
        EXPECT_TRUE(route_->close(session).ok());
        return rows;
    }

    static void expect_equal(const std::vector<Logits> & expected, const std::vector<Logits> & found) {
        ASSERT_EQ(expected.size(), found.size());
        for (size_t i = 0; i < expected.size(); ++i) {
            EXPECT_TRUE(bit_equal(expected[i], found[i])) << "step " << i;
        }
    }

    // Drops whole steps. Rolled back or not, what follows must be what a session computes that did only what counts.
    void check(const Steps & kept, const Steps & dropped) {
        SCOPED_TRACE("keep " + std::to_string(count(kept)) + " tokens, drop " + std::to_string(count(dropped)));
        const Steps next = decode(5, 4);
        bool rolled_back = false;
        const std::vector<Logits> found = after_rollback(kept + dropped, count(kept), next, rolled_back);
        EXPECT_TRUE(rolled_back || !can_rollback());
        expect_equal(fresh(rolled_back ? kept : kept + dropped, next), found);
    }

    using Key = std::pair<std::string, std::pair<uint32_t, bool>>;
    inline static std::map<Key, std::shared_ptr<Route>> routes_;  // loading takes longer than most tests
    std::shared_ptr<Route> route_;
};

// At every phase of a compressor that joins four tokens, and over the end of a block of 128.
TEST_P(Rollback, OfDecodedTokens) {
    for (uint32_t n_prompt = 122; n_prompt < 130; ++n_prompt) {
        for (const uint32_t n : {1U, 2U, 4U, 5U}) {
            check({tokens(n_prompt, 1), tokens(1, 2)}, decode(n, 3));
        }
    }
}

TEST_P(Rollback, OfAWholeDraft) {
    for (const uint32_t n_prompt : {125U, 126U, 127U, 128U}) {
        for (const uint32_t n : {1U, 3U, 4U, 6U}) {
            check({tokens(n_prompt, 1), tokens(1, 2)}, {tokens(n, 3)});
        }
    }
}

TEST_P(Rollback, OfMuch) {
    for (const uint32_t n : {20U, 63U, 64U, 65U, 300U}) {
        check({tokens(203, 1)}, {tokens(n, 3)});
    }
}

// What was kept of a draft was computed together with what was dropped: bits may differ from a session without drafts,
// but the dropped tokens leave no trace.
TEST_P(Rollback, OfTheRestOfADraft) {
    const Steps next = decode(5, 4);
    for (const uint32_t n_prompt : {125U, 126U, 127U, 128U}) {
        for (uint32_t n_kept = 1; n_kept < 5; ++n_kept) {
            SCOPED_TRACE("prompt " + std::to_string(n_prompt) + ", " + std::to_string(n_kept) + " of 5 kept");
            std::vector<std::vector<Logits>> rows;
            bool rolled_back = true;
            for (const uint32_t seed : {5U, 6U}) {
                std::vector<int32_t> draft = tokens(n_kept, 3);
                const std::vector<int32_t> wrong = tokens(5 - n_kept, seed);
                draft.insert(draft.end(), wrong.begin(), wrong.end());
                rows.push_back(after_rollback({tokens(n_prompt, 1), draft}, n_prompt + n_kept, next, rolled_back));
                EXPECT_TRUE(rolled_back || !(can_rollback() || has_snapshots()));
            }
            if (rolled_back) {
                expect_equal(rows[0], rows[1]);
                const Logits without = fresh({tokens(n_prompt, 1), tokens(n_kept, 3)}, next).front();
                const auto best = [](const Logits & row) {
                    return std::max_element(row.begin(), row.end()) - row.begin();
                };
                EXPECT_EQ(best(without), best(rows[0].front()));
            }
        }
    }
}

TEST_P(Rollback, ToTheBeginningIsAlwaysPossible) {
    const Steps steps = {tokens(123, 5), tokens(1, 6), tokens(2, 7)};
    size_t session = 0;
    ASSERT_OK(route_->open(session));
    const std::vector<Logits> expected = run(session, steps);
    run(session, {tokens(200, 8)});
    ASSERT_OK(route_->rollback(session, 0));
    expect_equal(expected, run(session, steps));
    ASSERT_OK(route_->close(session));
}

// As speculative decoding does it: the last token and drafts in one step, and all drafts rejected.
TEST_P(Rollback, AgainAndAgain) {
    size_t session = 0;
    ASSERT_OK(route_->open(session));
    Steps done = {tokens(150, 1)};
    run(session, done);
    std::vector<Logits> rows;
    for (uint32_t round = 0; round < 6; ++round) {
        std::vector<int32_t> step = tokens(4, 20 + round);
        run(session, {step});
        const uint32_t position = count(done) + 1;
        const Status status = route_->rollback(session, position);
        if (!status.ok()) {
            ASSERT_EQ(status.code, Code::no_rollback) << status.message;
            EXPECT_FALSE(can_rollback() || has_snapshots());
            break;
        }
        // The same widths, other drafts.
        done.push_back({step[0]});
        rows = run(session, decode(1, 40 + round));
        done.push_back(decode(1, 40 + round).front());
    }
    if (!rows.empty()) {
        const Logits expected = fresh({done.begin(), done.end() - 1}, {done.back()}).front();
        const auto best = [](const Logits & row) { return std::max_element(row.begin(), row.end()) - row.begin(); };
        EXPECT_EQ(best(expected), best(rows.front()));
    }
    ASSERT_OK(route_->close(session));
}

// Without a step in between.
TEST_P(Rollback, InTwoStages) {
    const Steps kept = {tokens(150, 1), tokens(1, 2)};
    const Steps dropped = decode(3, 3);
    size_t session = 0;
    ASSERT_OK(route_->open(session));
    run(session, kept + dropped);
    uint32_t position = count(kept + dropped);
    for (const uint32_t target : {position - 1, position - 3}) {
        if (route_->rollback(session, target).ok()) {
            position = target;
        } else {
            EXPECT_FALSE(can_rollback());
        }
    }
    const Steps next = decode(4, 4);
    const std::vector<Logits> found = run(session, next);
    ASSERT_OK(route_->close(session));
    expect_equal(fresh(kept + Steps(dropped.begin(), dropped.begin() + (position - count(kept))), next), found);
}

TEST_P(Rollback, BesideOtherSessions) {
    const Steps of_b = {tokens(180, 2), tokens(1, 3), tokens(4, 4), tokens(1, 5)};
    size_t a = 0;
    size_t b = 0;
    ASSERT_OK(route_->open(a));
    ASSERT_OK(route_->open(b));
    run(b, {of_b[0]});
    run(a, {tokens(150, 1), tokens(4, 6)});
    run(b, {of_b[1], of_b[2]});
    const Status status = route_->rollback(a, 151);
    EXPECT_TRUE(status.ok() || !(can_rollback() || has_snapshots()));
    const std::vector<Logits> found = run(b, {of_b[3]});
    ASSERT_OK(route_->close(a));
    ASSERT_OK(route_->close(b));
    expect_equal(fresh({of_b[0], of_b[1], of_b[2]}, {of_b[3]}), found);
}

std::vector<Setting> settings() {
    std::vector<Setting> result;
    for (const char * architecture : {"llama", "deepseek4", "glm-dsa", "qwen35", "qwen35moe"}) {
        for (const uint32_t rollback_tokens : {0U, 4U}) {
            for (const bool split : {false, true}) {
                result.push_back({architecture, rollback_tokens, split});
            }
        }
    }
    return result;
}

INSTANTIATE_TEST_SUITE_P(Models, Rollback, testing::ValuesIn(settings()), setting_name);

}  // namespace
}  // namespace meshnet::parity
