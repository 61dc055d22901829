// Parts of a worker's range: loading, waiting, dropping, and sessions over shards that overlap.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "tests/worker_support.h"
#include "worker/clock.h"
#include "worker/memory.h"
#include "worker/parts.h"

namespace meshnet::test {
namespace {

const std::string prompt = "The quick brown fox jumps over the lazy dog";

// What loads parts in a test: holds them back, makes them fail, and counts those that are loaded.
class Loader {
  public:
    LoadPart load_part() {
        return [this](LayerRange layers, std::unique_ptr<ShardEngine> & engine) { return load(layers, engine); };
    }
    void hold() {
        std::lock_guard lock(mutex_);
        held_ = true;
    }
    void release() {
        std::lock_guard lock(mutex_);
        held_ = false;
        changed_.notify_all();
    }
    bool wait_held() {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, std::chrono::milliseconds(deadline_ms), [&] { return waiting_ > 0; });
    }
    // Returned instead of loading.
    void fail_with(Status failure) {
        std::lock_guard lock(mutex_);
        failure_ = std::move(failure);
    }
    uint32_t loads() {
        std::lock_guard lock(mutex_);
        return loads_;
    }
    int loaded() const {
        return static_cast<int>(alive_.use_count()) - 1;
    }

  private:
    class Counted final : public ShardEngine {
      public:
        Counted(std::unique_ptr<ShardEngine> inner, std::shared_ptr<int> alive)
            : inner_(std::move(inner)), alive_(std::move(alive)) {}
        const EngineDescription & describe() const override {
            return inner_->describe();
        }
        Status open_sequence(int32_t & sequence) override {
            return inner_->open_sequence(sequence);
        }
        Status close_sequence(int32_t sequence) override {
            return inner_->close_sequence(sequence);
        }
        Status rollback(int32_t sequence, uint32_t position) override {
            return inner_->rollback(sequence, position);
        }
        Status execute(const std::vector<Step> & steps, std::vector<StepResult> & results) override {
            return inner_->execute(steps, results);
        }
        Status tokenize(std::string_view text, bool add_special, bool parse_special,
                        std::vector<int32_t> & tokens) const override {
            return inner_->tokenize(text, add_special, parse_special, tokens);
        }
        Status piece(int32_t token, std::string & bytes) const override {
            return inner_->piece(token, bytes);
        }
        bool is_eog(int32_t token) const override {
            return inner_->is_eog(token);
        }

      private:
        std::unique_ptr<ShardEngine> inner_;
        std::shared_ptr<int> alive_;
    };

    Status load(LayerRange layers, std::unique_ptr<ShardEngine> & engine) {
        std::unique_lock lock(mutex_);
        ++loads_;
        ++waiting_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return !held_; });
        --waiting_;
        if (!failure_.ok()) {
            return failure_;
        }
        engine = std::make_unique<Counted>(make_engine("test:6", layers), alive_);
        return Status::success();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    bool held_ = false;
    int waiting_ = 0;
    uint32_t loads_ = 0;
    Status failure_;
    const std::shared_ptr<int> alive_ = std::make_shared<int>(0);
};

struct Got {
    Refusal refusal;
    ServedPtr part;
};

class PartsTest : public testing::Test {
  protected:
    Parts & start(PartOptions options = {}) {
        parts_ = std::make_unique<Parts>(whole->describe(), loader.load_part(), options,
                                         [this] { return free_bytes.load(); });
        return *parts_;
    }
    // Asks; the answer comes when it comes.
    std::future<Got> ask(LayerRange layers, int64_t at_us = 0) {
        auto got = std::make_shared<std::promise<Got>>();
        parts_->get(layers, at_us, [got](const Refusal & refusal, ServedPtr part) {
            got->set_value({refusal, std::move(part)});
        });
        return got->get_future();
    }
    Got get(LayerRange layers, int64_t at_us = 0) {
        auto answer = ask(layers, at_us);
        if (answer.wait_for(std::chrono::milliseconds(deadline_ms)) != std::future_status::ready) {
            ADD_FAILURE() << "no answer";
            return {};
        }
        return answer.get();
    }
    static bool is_ready(std::future<Got> & answer) {
        return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }
    void TearDown() override {
        loader.release();
    }

    const std::unique_ptr<ShardEngine> whole = make_engine("test:6", {1, 6});
    Loader loader;
    std::atomic<uint64_t> free_bytes{1ULL << 40};

  private:
    std::unique_ptr<Parts> parts_;
};

TEST_F(PartsTest, AreCutWhereTheEngineAllowsIt) {
    EngineDescription d = whole->describe();
    d.legal_cuts = {3};
    d.cut_boundaries = {d.boundary_in};
    d.illegal_cuts = {{2, "'x' needs 'y'"}, {4, "'v' needs 'w'"}, {5, "no"}};
    const Parts parts(d, loader.load_part(), {});
    for (const auto & [start, end] : {std::pair{1U, 6U}, {1U, 3U}, {3U, 6U}}) {
        EXPECT_FALSE(parts.check(start, end).refused()) << start << ":" << end;
    }
    for (const auto & [start, end] : {std::pair{0U, 6U}, {1U, 7U}, {3U, 3U}, {5U, 2U}, {0xffffffffU, 3U}, {7U, 9U}}) {
        const auto refusal = parts.check(start, end);
        EXPECT_EQ(refusal.code, v1::REFUSAL_WRONG_LAYERS);
        EXPECT_EQ(refusal.message,
                  "this worker serves layers 1:6, not " + std::to_string(start) + ":" + std::to_string(end));
    }
    EXPECT_EQ(parts.check(3, 4).message,
              "this worker serves layers 1:6, not 3:4: it cannot be cut before layer 4 ('v' needs 'w')");
    EXPECT_EQ(parts.check(2, 4).message,
              "this worker serves layers 1:6, not 2:4: it cannot be cut before layer 2 ('x' needs 'y')");
}

TEST_F(PartsTest, AreNotThereWithoutALoaderOrALimit) {
    const Parts without(whole->describe(), {}, {});
    PartOptions none;
    none.max_parts = 0;
    const Parts limited(whole->describe(), loader.load_part(), none);
    for (const Parts * parts : {&without, &limited}) {
        EXPECT_FALSE(parts->enabled());
        EXPECT_FALSE(parts->check(1, 6).refused());
        EXPECT_EQ(parts->check(1, 3).message, "this worker serves layers 1:6 as a whole, not 1:3");
    }
}

TEST_F(PartsTest, AreLoadedOnceForAllWhoAsk) {
    auto & parts = start();
    loader.hold();
    auto first = ask({1, 3});
    auto second = ask({1, 3});
    ASSERT_TRUE(loader.wait_held());
    EXPECT_FALSE(is_ready(first) || is_ready(second));
    EXPECT_TRUE(parts.needs_tick());
    loader.release();
    const auto part = first.get().part;
    ASSERT_NE(part, nullptr);
    EXPECT_EQ(part->model.layers, (LayerRange{1, 3}));
    EXPECT_EQ(second.get().part, part);
    auto third = ask({1, 3});
    ASSERT_TRUE(is_ready(third)) << "what is loaded is there at once";
    EXPECT_EQ(third.get().part, part);
    EXPECT_EQ(loader.loads(), 1U);
}

TEST_F(PartsTest, AreLoadedEvenIfNobodyWaitsSoLong) {
    PartOptions options;
    options.patience_ms = 1000;
    auto & parts = start(options);
    loader.hold();
    auto answer = ask({1, 3}, 5'000'000);
    ASSERT_TRUE(loader.wait_held());
    parts.tick(5'999'999);
    EXPECT_FALSE(is_ready(answer));
    parts.tick(6'000'000);
    ASSERT_TRUE(is_ready(answer));
    const auto refusal = answer.get().refusal;
    EXPECT_EQ(refusal.code, v1::REFUSAL_NO_CAPACITY);
    EXPECT_EQ(refusal.message, "layers 1:3 are being loaded; try again");
    auto again = ask({1, 3}, 6'000'000);
    loader.release();
    EXPECT_NE(again.get().part, nullptr);
    EXPECT_EQ(loader.loads(), 1U);
}

TEST_F(PartsTest, MakeRoomForOthersWhenUnused) {
    PartOptions options;
    options.max_parts = 2;
    start(options);
    auto first = get({1, 3}).part;
    auto second = get({3, 6}).part;
    const auto refusal = get({2, 6}).refusal;
    EXPECT_EQ(refusal.code, v1::REFUSAL_NO_CAPACITY);
    EXPECT_EQ(refusal.message, "sessions use other parts of this worker's range (1:3, 3:6)");
    EXPECT_EQ(refusal.requested, 3U);
    EXPECT_EQ(refusal.limit, 2U);
    first.reset();
    EXPECT_EQ(loader.loaded(), 2) << "not dropped before there is need";
    EXPECT_NE(get({2, 6}).part, nullptr);
    EXPECT_EQ(loader.loaded(), 2);
    EXPECT_EQ(get({3, 6}).part, second) << "the one in use stayed";
    EXPECT_EQ(loader.loads(), 3U);
}

TEST_F(PartsTest, OneThatIsBeingLoadedMakesNoRoom) {
    PartOptions options;
    options.max_parts = 1;
    start(options);
    loader.hold();
    auto first = ask({1, 3});
    EXPECT_EQ(get({3, 6}).refusal.code, v1::REFUSAL_NO_CAPACITY);
    loader.release();
    EXPECT_NE(first.get().part, nullptr);
}

TEST_F(PartsTest, AreDroppedSomeTimeAfterTheirLastUse) {
    PartOptions options;
    options.linger_ms = 1000;
    auto & parts = start(options);
    const int64_t now = now_us();
    auto part = get({1, 3}, now).part;
    parts.tick(now + 50'000'000);
    EXPECT_EQ(loader.loaded(), 1) << "in use";
    part.reset();
    parts.tick(now + 50'900'000);
    EXPECT_EQ(loader.loaded(), 1);
    parts.tick(now + 51'100'000);
    EXPECT_EQ(loader.loaded(), 0);
    EXPECT_FALSE(parts.needs_tick());
    EXPECT_NE(get({1, 3}, now).part, nullptr);
    EXPECT_EQ(loader.loads(), 2U);
}

TEST_F(PartsTest, NeedMemory) {
    start();
    free_bytes = 0;
    const auto refusal = get({1, 3}).refusal;
    EXPECT_EQ(refusal.code, v1::REFUSAL_NO_CAPACITY);
    EXPECT_EQ(refusal.message, "layers 1:3 cannot be served now: that takes about 2 MB of memory, and 0 MB are free");
    EXPECT_EQ(loader.loads(), 0U);
    free_bytes = 1ULL << 40;
    EXPECT_NE(get({1, 3}).part, nullptr);
}

TEST_F(PartsTest, ThatCannotBeLoadedAreRefused) {
    auto & parts = start();
    loader.fail_with({Code::engine_failure, "the file is gone"});
    const auto refusal = get({1, 3}).refusal;
    EXPECT_EQ(refusal.code, v1::REFUSAL_ENGINE_FAILURE);
    EXPECT_EQ(refusal.message, "layers 1:3 cannot be served now: the file is gone");
    EXPECT_FALSE(parts.needs_tick());
    loader.fail_with(Status::success());
    EXPECT_NE(get({1, 3}).part, nullptr);
}

TEST_F(PartsTest, StopRefusesWhoWaitsAndWhoComes) {
    auto & parts = start();
    loader.hold();
    auto waiting = ask({1, 3});
    auto behind = ask({3, 6});
    ASSERT_TRUE(loader.wait_held());
    parts.stop();
    ASSERT_TRUE(is_ready(waiting) && is_ready(behind));
    EXPECT_EQ(waiting.get().refusal.code, v1::REFUSAL_DRAINING);
    EXPECT_EQ(behind.get().refusal.code, v1::REFUSAL_DRAINING);
    EXPECT_EQ(get({1, 3}).refusal.code, v1::REFUSAL_DRAINING);
}

// --------------------------------------------------------------------------------------------------- free memory

// A system that tells what a test wants.
class FreeMemory : public testing::Test {
  protected:
    void SetUp() override {
        std::string name = testing::TempDir() + "meshnet-memory-XXXXXX";
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        root = name;
    }
    void TearDown() override {
        std::filesystem::remove_all(root);
    }
    void write(const std::string & path, const std::string & text) const {
        std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
        std::ofstream(root + path) << text;
    }

    std::string root;
};

TEST_F(FreeMemory, IsWhatTheMachineHas) {
    EXPECT_EQ(free_memory_bytes(root), std::numeric_limits<uint64_t>::max());
    write("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   2000 kB\nBuffers: 5 kB\n");
    EXPECT_EQ(free_memory_bytes(root), 2'048'000U);
    EXPECT_GT(free_memory_bytes(), 0U);
}

TEST_F(FreeMemory, IsWithinTheLimitsOfAllGroupsAround) {
    write("/proc/meminfo", "MemAvailable: 9000 kB\n");
    write("/proc/self/cgroup", "0::/outer/inner\n");
    write("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
    write("/sys/fs/cgroup/outer/inner/memory.current", "100\n");
    write("/sys/fs/cgroup/outer/memory.max", "5000\n");
    write("/sys/fs/cgroup/outer/memory.current", "3000\n");
    write("/sys/fs/cgroup/outer/memory.stat", "anon 7\ninactive_file 400\n");
    EXPECT_EQ(free_memory_bytes(root), 2400U);
    write("/sys/fs/cgroup/outer/memory.current", "8000\n");
    EXPECT_EQ(free_memory_bytes(root), 0U);
}

TEST_F(FreeMemory, IsWithinTheLimitsOfOlderGroups) {
    write("/proc/meminfo", "MemAvailable: 9000 kB\n");
    write("/proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/not/here\n0::/\n");
    write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
    write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "3000\n");
    write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n");
    EXPECT_EQ(free_memory_bytes(root), 2500U);
}

// ------------------------------------------------------------------------------------------ sessions over parts

std::vector<uint32_t> answer(TestSession & session, const std::string & text = prompt) {
    session.open();
    auto request = session.generate_request(text, 60);
    request.set_ignore_eog(true);
    request.set_chunk_tokens(7);
    return session.client(0).generate(request).ids();
}

struct Overlap {
    const char * name;
    const char * model;
    uint32_t cut;
};

class Overlapping : public testing::TestWithParam<Overlap> {};

TEST_P(Overlapping, ShardsAnswerLikeAPlainLoop) {
    const auto & [name, model, cut] = GetParam();
    Hop head(model, {0, 4});
    Hop tail(model, {2, 6});
    TestSession session({part_of(head.address(), 0, cut), part_of(tail.address(), cut, 6)});
    EXPECT_EQ(answer(session), direct_tokens("test:6", prompt, 60, {}, true));
    const auto closed = session.close();
    EXPECT_EQ(closed[0].stats().layers().end(), cut);
    EXPECT_EQ(closed[1].stats().layers().start(), cut);
    EXPECT_EQ(closed[1].stats().layers().end(), 6U);
}

INSTANTIATE_TEST_SUITE_P(Worker, Overlapping,
                         testing::Values(Overlap{"PartOfTheHead", "test:6", 2}, Overlap{"PartOfBoth", "test:6", 3},
                                         Overlap{"PartOfTheTail", "test:6", 4}, Overlap{"TwoTensors", "test:6:0:2", 3}),
                         [](const auto & info) { return info.param.name; });

TEST(PartRoutes, OneWorkerIsSeveralHopsAndAMiddleOne) {
    // A worker with the whole model serves the middle of a route whose ends are others' parts.
    Hop whole("test:6", {0, 6});
    Hop other("test:6", {0, 6});
    TestSession session(
        {part_of(other.address(), 0, 2), part_of(whole.address(), 2, 5), part_of(other.address(), 5, 6)},
        "a-session-over-3");
    // Both ends in one worker would be one session with two places: it is refused.
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    EXPECT_TRUE(session.client(2).open(session.open_request(2), response, refusal).ok());
    EXPECT_FALSE(session.client(0).open(session.open_request(0), response, refusal).ok());
    EXPECT_EQ(refusal.refusal(), v1::REFUSAL_STALE_EPOCH);
    session.close();
    Hop last("test:6", {5, 6});
    TestSession three({part_of(other.address(), 0, 2), part_of(whole.address(), 2, 5), last.address()});
    EXPECT_EQ(answer(three), direct_tokens("test:6", prompt, 60, {}, true));
    EXPECT_EQ(three.client(1).generate(three.generate_request(prompt, 1)).status.error_code(),
              grpc::StatusCode::INVALID_ARGUMENT)
        << "no head of this session, though it has layer 0";
}

TEST(PartRoutes, PartsAndTheWholeServeSideBySide) {
    Hop head("test:6", {0, 3});
    Hop short_head("test:6", {0, 2});
    Hop tail("test:6", {2, 6});
    const auto expected = direct_tokens("test:6", prompt, 60, {}, true);
    std::vector<std::thread> clients;
    std::atomic<int> right{0};
    for (int i = 0; i < 8; ++i) {
        clients.emplace_back([&, i] {
            TestSession session(i % 2 == 0 ? std::vector{head.address(), part_of(tail.address(), 3, 6)}
                                           : std::vector{short_head.address(), tail.address()});
            right += answer(session) == expected ? 1 : 0;
            session.close();
        });
    }
    for (auto & client : clients) {
        client.join();
    }
    EXPECT_EQ(right, 8);
    EXPECT_EQ(tail.client().status().open_sessions(), 0U);
}

TEST(PartRoutes, SlotsAreCountedOverAllParts) {
    Hop tail("test:6", {2, 6}, {}, 2);
    const HopAddress head = {"127.0.0.1:9", {}};
    TestSession first({head, tail.address()});
    TestSession second({head, part_of(tail.address(), 3, 6)});
    TestSession third({head, part_of(tail.address(), 4, 6)});
    const auto open = [](const TestSession & session) {
        v1::OpenResponse response;
        v1::RefusalDetail refusal;
        static_cast<void>(session.client(1).open(session.open_request(1), response, refusal));
        return refusal;
    };
    EXPECT_EQ(open(first).refusal(), v1::REFUSAL_UNSPECIFIED);
    EXPECT_EQ(open(second).refusal(), v1::REFUSAL_UNSPECIFIED);
    EXPECT_EQ(open(third).refusal(), v1::REFUSAL_NO_CAPACITY);
    EXPECT_EQ(open(third).limit(), 2U);
}

TEST(PartRoutes, LoadingHoldsUpNobody) {
    Loader loader;
    Hop head("test:6", {0, 2});
    WorkerOptions options;
    options.parts.patience_ms = 200;
    Hop tail(make_engine("test:6", {2, 6}), options, loader.load_part());
    TestSession whole({head.address(), tail.address()});
    TestSession part({{"127.0.0.1:9", {}}, part_of(tail.address(), 3, 6)});
    loader.hold();
    const auto open = [&](v1::RefusalDetail & refusal) {
        v1::OpenResponse response;
        return part.client(1).open(part.open_request(1), response, refusal);
    };
    v1::RefusalDetail refusal;
    std::thread opening([&] { EXPECT_FALSE(open(refusal).ok()); });
    EXPECT_TRUE(loader.wait_held());
    EXPECT_EQ(answer(whole), direct_tokens("test:6", prompt, 60, {}, true));
    opening.join();
    EXPECT_EQ(refusal.refusal(), v1::REFUSAL_NO_CAPACITY);
    EXPECT_EQ(refusal.message(), "layers 3:6 are being loaded; try again");
    EXPECT_EQ(tail.client().status().open_sessions(), 1U) << "who was refused has no session";
    loader.release();
    EXPECT_TRUE(eventually([&] { return open(refusal).ok(); }));
    EXPECT_EQ(loader.loads(), 1U);
}

TEST(PartRoutes, ReopenedForOtherLayersASessionStartsAnew) {
    Hop head("test:6", {0, 4});
    Hop tail("test:6", {2, 6});
    const auto expected = direct_tokens("test:6", prompt, 60, {}, true);
    const std::string id = new_session_id();
    TestSession whole_tail({part_of(head.address(), 0, 2), tail.address()}, id);
    EXPECT_EQ(answer(whole_tail), expected);
    TestSession whole_head({head.address(), part_of(tail.address(), 4, 6)}, id);
    whole_head.epoch = 2;
    for (const auto & opened : whole_head.open()) {
        EXPECT_EQ(opened.cached_tokens(), 0U);
        EXPECT_EQ(opened.prefix_hash(), prefix_hash_seed);
    }
    whole_head.epoch = 3;
    EXPECT_EQ(answer(whole_head), expected);
    whole_head.epoch = 4;
    for (const auto & opened : whole_head.open()) {
        EXPECT_EQ(opened.cached_tokens(), prompt.size() + 59) << "the same layers keep what they have";
    }
}

TEST(PartRoutes, ReopenedForOtherLayersWhileAStepIsComputed) {
    Hop head("test:6", {0, 4});
    Hop tail("test:6", {2, 6});
    const std::string id = new_session_id();
    TestSession before({part_of(head.address(), 0, 2), tail.address()}, id);
    before.open();
    tail.control().hold();
    std::thread generating([&] { EXPECT_TRUE(before.generate(prompt, 10).failed.has_value()); });
    EXPECT_TRUE(tail.control().wait_held());
    TestSession after({head.address(), part_of(tail.address(), 4, 6)}, id);
    after.epoch = 2;
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    std::thread opening([&] {
        EXPECT_TRUE(after.client(1).open(after.open_request(1), response, refusal).ok());
        EXPECT_EQ(response.cached_tokens(), 0U) << "what was computed is of other layers";
    });
    EXPECT_TRUE(after.client(0).open(after.open_request(0), response, refusal).ok());
    generating.join();
    tail.control().release();
    opening.join();
    auto request = after.generate_request(prompt, 60);
    request.set_ignore_eog(true);
    EXPECT_EQ(after.client(0).generate(request).ids(), direct_tokens("test:6", prompt, 60, {}, true));
}

TEST(PartRoutes, StepsAreCheckedAgainstTheSessionsOwnLayers) {
    Hop head("test:6:0:2", {0, 4});
    FakeNeighbour neighbour;
    // A worker with layer 0 takes boundaries all the same where a session uses it from layer 2 on.
    const auto middle = part_of(head.address(), 2, 4);
    TestSession session({{neighbour.address(), {}}, middle, {neighbour.address(), {}}});
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(session.client(1).open(session.open_request(1), response, refusal).ok());
    SeamPeer peer(head.address().address);
    peer.send(step_frame(session.id(), 1, 0, {}, {1, 2}));  // lacks the second tensor
    const auto frame = neighbour.next_frame();
    ASSERT_TRUE(frame.has_value() && frame->has_failure());
    EXPECT_EQ(frame->failure().refusal(), v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(frame->failure().message(), "the boundary has 2 tensors, not 1");
}

TEST(PartRoutes, DrainingRefusesWhoWaitsForAPart) {
    Loader loader;
    Hop tail(make_engine("test:6", {2, 6}), {}, loader.load_part());
    loader.hold();
    TestSession part({{"127.0.0.1:9", {}}, part_of(tail.address(), 3, 6)});
    v1::RefusalDetail refusal;
    std::thread opening([&] {
        v1::OpenResponse response;
        EXPECT_FALSE(part.client(1).open(part.open_request(1), response, refusal).ok());
    });
    EXPECT_TRUE(loader.wait_held());
    tail.worker().drain();
    opening.join();
    EXPECT_EQ(refusal.refusal(), v1::REFUSAL_DRAINING);
    loader.release();
}

}  // namespace
}  // namespace meshnet::test
