// A route that is repaired in mid-generation: what is replayed, what is left out, and that nothing can be told from it.
#include <gtest/gtest.h>

#include <thread>

#include "tests/repair_support.h"
#include "worker/clock.h"
#include "worker/prefix.h"

namespace meshnet::test {
namespace {

const std::vector<LayerRange> thirds = {{0, 2}, {2, 4}, {4, 6}};

RepairCase test_case(bool seeded, bool can_rollback) {
    RepairCase c;
    c.make_hop = [can_rollback](size_t hop) {
        auto made = std::make_unique<Hop>("test:6", thirds[hop]);
        made->control().set([&](auto & control) { control.no_rollback = !can_rollback; });
        return made;
    };
    c.can_rollback = can_rollback;
    for (uint32_t i = 0; i < 50; ++i) {
        c.prompt.push_back('a' + i * 7 % 26);
    }
    c.n_new = 60;
    c.sampling.set_logprobs(4);
    if (seeded) {
        c.sampling.set_temperature(0.8f);
        c.sampling.set_seed(21);
        c.sampling.set_penalty_last_n(16);
        c.sampling.set_repeat_penalty(1.2f);
        c.sampling.set_frequency_penalty(0.1f);
        c.sampling.set_top_k(40);
    }
    return c;
}

struct Kind {
    const char * name;
    bool seeded;
    bool can_rollback;
};

class Repair : public testing::TestWithParam<Kind> {
  protected:
    RepairCase c = test_case(GetParam().seeded, GetParam().can_rollback);
    Answer expected = undisturbed(c);
};

// Before anything, in prefill, before its last chunk, after the first token, after many and before the last.
TEST_P(Repair, OfAnyHopAtAnyMoment) {
    ASSERT_EQ(expected.tokens.size(), c.n_new);
    ASSERT_EQ(expected.steps[2].size(), c.chunks() + c.n_new - 1);
    for (const uint32_t tail_steps : {0U, 3U, c.chunks() - 1, c.chunks(), c.chunks() + 20, c.chunks() + c.n_new - 2}) {
        for (const size_t victim : {0, 1, 2}) {
            SCOPED_TRACE("hop " + std::to_string(victim) + " after " + std::to_string(tail_steps) + " steps");
            expect_equal(repaired(c, {{victim, tail_steps, false}}), expected);
        }
    }
}

TEST_P(Repair, LateFramesOfTheLostHopDoNoHarm) {
    for (const uint32_t tail_steps : {3U, c.chunks() + 5}) {
        for (const size_t victim : {0, 1, 2}) {
            SCOPED_TRACE("hop " + std::to_string(victim) + " after " + std::to_string(tail_steps) + " steps");
            expect_equal(repaired(c, {{victim, tail_steps, true}}), expected);
        }
    }
}

// The second repair comes while the first one refills, the third one later.
TEST_P(Repair, AgainAndAgain) {
    expect_equal(repaired(c, {{1, c.chunks() + 9, false}, {2, 2, false}, {0, c.chunks() + 12, false}, {1, 0, false}}),
                 expected);
}

INSTANTIATE_TEST_SUITE_P(Worker, Repair,
                         testing::Values(Kind{"Greedy", false, true}, Kind{"Seeded", true, true},
                                         Kind{"SeededNoRollback", true, false}),
                         [](const auto & info) { return info.param.name; });

// What is not lost is not computed again.
TEST(RepairedRoute, KeepsWhatItCan) {
    const auto c = test_case(false, true);
    const uint32_t known = 50 + 21;  // 21 tokens have come, and the tail holds the last one back
    const auto steps_after = [&](size_t victim) {
        const auto run = repaired(c, {{victim, c.chunks() + 20, false}});
        return run.resumed_at.at(0);
    };
    EXPECT_EQ(steps_after(2), (std::vector<uint32_t>{0, 0, 0}));
    EXPECT_EQ(steps_after(1), (std::vector<uint32_t>{0, 0, known - 1}));
    EXPECT_EQ(steps_after(0), (std::vector<uint32_t>{0, known - 1, known - 1}));
}

TEST(RepairedRoute, TheReplayCountsAsPrefill) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.open();
    auto request = session.generate_request(std::string(20, 'x'), 3);
    request.set_chunk_tokens(8);
    request.set_replayed_tokens(5);
    request.set_ignore_eog(true);
    const auto outcome = session.client(0).generate(request);
    ASSERT_EQ(outcome.tokens.size(), 3U);
    EXPECT_EQ(outcome.ids(), direct_tokens("test:6", std::string(20, 'x'), 3, {}, true));
    EXPECT_EQ(outcome.prefill.back().done_tokens(), 20U);
    using Steps = std::vector<ControlledEngine::StepShape>;
    EXPECT_EQ(hops[1]->control().taken_steps(),
              (Steps{{0, 8}, {8, 7}, {15, 1}, {16, 1}, {17, 1}, {18, 1}, {19, 1}, {20, 1}, {21, 1}}));
    const auto closed = session.close();
    for (const auto & hop : closed) {
        EXPECT_EQ(hop.stats().prefill_tokens(), 20U);
        EXPECT_EQ(hop.stats().decode_tokens(), 2U);
    }
}

// ------------------------------------------------------------------------------------------- the middle of a route

v1::DescribeResponse described(const std::string & shard_id) {
    v1::DescribeResponse description;
    description.set_shard_id(shard_id);
    return description;
}

// For tests that let time pass.
WorkerOptions without_connect_timeout() {
    WorkerOptions options;
    options.connect_timeout_ms = 10'000'000;
    return options;
}

// A middle hop whose neighbours and head the test plays.
class LoneMiddle : public testing::Test {
  protected:
    Hop middle{"test:6", LayerRange{2, 4}, without_connect_timeout()};
    std::unique_ptr<FakeNeighbour> head = std::make_unique<FakeNeighbour>();
    FakeNeighbour next;
    SeamPeer peer{middle.address().address};
    TestSession session{
        {{head->address(), described("fake-head")}, middle.address(), {next.address(), described("z")}}};

    void SetUp() override {
        open();
    }

    v1::OpenResponse open() {
        v1::OpenResponse response;
        v1::RefusalDetail refusal;
        EXPECT_TRUE(session.client(1).open(session.open_request(1), response, refusal).ok());
        return response;
    }

    // A step that only continues.
    v1::SeamFrame step(uint32_t position, const std::vector<uint32_t> & prefix,
                       const std::vector<uint32_t> & tokens) const {
        auto frame = step_frame(session.id(), session.epoch, position, prefix, tokens);
        frame.mutable_step()->clear_sampling();
        return frame;
    }
    v1::SeamFrame first(uint32_t position, const std::vector<uint32_t> & prefix, const std::vector<uint32_t> & tokens,
                        const std::vector<uint32_t> & resume_at) const {
        auto frame = step(position, prefix, tokens);
        frame.mutable_step()->set_rollback(true);
        frame.mutable_step()->set_prefill(true);
        frame.mutable_step()->set_step_timeout_ms(4321);
        frame.mutable_step()->mutable_sampling()->set_seed(77);
        frame.mutable_step()->mutable_resume_at()->Add(resume_at.begin(), resume_at.end());
        return frame;
    }
    v1::SeamFrame end(uint64_t epoch) const {
        v1::SeamFrame frame;
        frame.set_session_id(session.id());
        frame.set_epoch(epoch);
        frame.mutable_end()->set_message("nobody is there");
        return frame;
    }

    v1::FailureFrame reported() {
        const auto frame = head->next_frame();
        EXPECT_TRUE(frame.has_value() && frame->has_failure());
        return frame.has_value() ? frame->failure() : v1::FailureFrame();
    }
};

TEST_F(LoneMiddle, SendsOnlyWhatTheNextHopLacks) {
    const std::vector<uint32_t> resume_at = {0, 0, 4};
    peer.send(first(0, {}, {1, 2}, resume_at));
    peer.send(step(2, {1, 2}, {3, 4}));
    auto wanted = step(4, {1, 2, 3, 4}, {5, 6});
    wanted.mutable_step()->add_sample_at(1);
    peer.send(wanted);
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(peer.credit()->refused(), v1::REFUSAL_UNSPECIFIED) << "whether it is sent on or not";
    }
    const auto frame = next.next_frame();
    ASSERT_TRUE(frame.has_value() && frame->has_step());
    EXPECT_EQ(frame->frame_no(), 1U) << "nothing came before";
    EXPECT_EQ(frame->step().position(), 4U);
    EXPECT_EQ(frame->step().prefix_hash(), wanted.step().prefix_hash());
    EXPECT_TRUE(frame->step().rollback());
    EXPECT_EQ(frame->step().sampling().seed(), 77U);
    EXPECT_EQ(frame->step().step_timeout_ms(), 4321U);
    EXPECT_EQ(std::vector<uint32_t>(frame->step().resume_at().begin(), frame->step().resume_at().end()), resume_at);
    EXPECT_EQ(frame->step().sample_at_size(), 1);
    EXPECT_EQ(frame->step().boundary_size(), 1);
    peer.send(step(6, {1, 2, 3, 4, 5, 6}, {7}));
    const auto after = next.next_frame();
    ASSERT_TRUE(after.has_value() && after->has_step());
    EXPECT_FALSE(after->step().rollback() || after->step().has_sampling() || after->step().resume_at_size() > 0);
}

TEST_F(LoneMiddle, RefusesAStepThatCrossesWhereTheNextHopResumes) {
    peer.send(first(0, {}, {1, 2}, {0, 0, 3}));
    peer.send(step(2, {1, 2}, {3, 4}));
    const auto failure = reported();
    EXPECT_EQ(failure.refusal(), v1::REFUSAL_BAD_REQUEST) << failure.message();
    EXPECT_EQ(failure.hop_index(), 1U);
    EXPECT_NE(failure.message().find("position 3"), std::string::npos) << failure.message();
    ++session.epoch;
    open();
    peer.send(first(0, {}, {1, 2}, {0, 0, 1}));
    EXPECT_EQ(reported().refusal(), v1::REFUSAL_BAD_REQUEST);
}

TEST_F(LoneMiddle, RefusesResumePositionsThatCannotBe) {
    for (const std::vector<uint32_t> & resume_at :
         std::vector<std::vector<uint32_t>>{{0, 1, 4}, {0, 0}, {0, 0, 4, 5}, {4, 0, 0}}) {
        peer.send(first(0, {}, {1, 2}, resume_at));
        EXPECT_EQ(reported().refusal(), v1::REFUSAL_BAD_REQUEST) << testing::PrintToString(resume_at);
        ++session.epoch;
        open();
    }
    auto samples = first(0, {}, {1, 2}, {0, 0, 4});
    samples.mutable_step()->add_sample_at(1);
    peer.send(samples);
    EXPECT_EQ(reported().refusal(), v1::REFUSAL_BAD_REQUEST) << "nobody would sample";
}

TEST_F(LoneMiddle, ANewGenerationForgetsWhereTheLastOneResumed) {
    peer.send(first(0, {}, {1, 2}, {0, 0, 4}));
    peer.send(first(0, {}, {8, 9}, {}));
    const auto frame = next.next_frame();
    ASSERT_TRUE(frame.has_value() && frame->has_step());
    EXPECT_EQ(frame->step().position(), 0U);
    EXPECT_EQ(frame->step().tokens(0), 8U);
    peer.send(first(0, {}, {1, 2}, {0, 0, 4}));
    ASSERT_TRUE(peer.credit().has_value() && peer.credit().has_value() && peer.credit().has_value());
    ++session.epoch;
    EXPECT_EQ(open().cached_tokens(), 2U);
    peer.send(first(2, {1, 2}, {3}, {}));
    EXPECT_EQ(next.next_frame()->step().position(), 2U);
}

TEST_F(LoneMiddle, AnEndFrameClosesTheSessionAndGoesOn) {
    ++session.epoch;
    open();
    peer.send(end(session.epoch - 1));
    EXPECT_EQ(peer.credit()->refused(), v1::REFUSAL_UNSPECIFIED);
    peer.send(end(session.epoch + 1));
    EXPECT_EQ(peer.credit()->refused(), v1::REFUSAL_UNKNOWN_SESSION);
    EXPECT_EQ(middle.worker().status().open_sessions(), 1U) << "it is not this epoch's";
    peer.send(end(session.epoch));
    EXPECT_TRUE(peer.credit().has_value());
    EXPECT_EQ(middle.worker().status().open_sessions(), 0U);
    const auto frame = next.next_frame();
    ASSERT_TRUE(frame.has_value() && frame->has_end());
    EXPECT_EQ(frame->session_id(), session.id());
    EXPECT_EQ(frame->epoch(), session.epoch);
    EXPECT_EQ(frame->end().message(), "nobody is there");
    peer.send(end(session.epoch));
    EXPECT_EQ(peer.credit()->refused(), v1::REFUSAL_UNKNOWN_SESSION);
}

TEST_F(LoneMiddle, AnEndFrameWhileAStepIsComputed) {
    middle.control().hold();
    peer.send(first(0, {}, {1, 2}, {}));
    ASSERT_TRUE(middle.control().wait_held());
    peer.send(end(session.epoch));
    ASSERT_TRUE(next.next_frame()->has_end());
    EXPECT_EQ(middle.worker().status().open_sessions(), 0U);
    middle.control().release();
    EXPECT_TRUE(peer.credit().has_value() && peer.credit().has_value());
}

TEST_F(LoneMiddle, ALostHeadIsToldToTheHopBefore) {
    head.reset();
    // The session breaks at once, though no frame is on its way.
    ASSERT_TRUE(eventually([&] {
        peer.send(step(0, {}, {1}));
        return peer.credit()->refused() == v1::REFUSAL_PEER_LOST;
    }));
}

TEST_F(LoneMiddle, ABrokenSessionWithoutAGatewayEndsHereAndBehind) {
    const int64_t opened_us = now_us();
    auto & worker = middle.worker();
    worker.tick(opened_us + 60'000'000);
    EXPECT_EQ(worker.status().open_sessions(), 1U) << "nothing is broken, and it does not hear of the gateway";
    auto bad = step(5, {}, {1});
    peer.send(bad);
    EXPECT_EQ(reported().refusal(), v1::REFUSAL_PREFIX_MISMATCH);
    worker.tick(opened_us + 9'000'000);
    EXPECT_EQ(worker.status().open_sessions(), 1U);
    worker.tick(now_us() + 10'100'000);
    EXPECT_EQ(worker.status().open_sessions(), 0U);
    const auto frame = next.next_frame();
    ASSERT_TRUE(frame.has_value() && frame->has_end());
    EXPECT_EQ(frame->epoch(), session.epoch);
}

// -------------------------------------------------------------------------------------------------------- re-opening

TEST_F(LoneMiddle, ReopeningReturnsWhatTheEpochMeasured) {
    peer.send(first(0, {}, {1, 2, 3}, {}));
    peer.send(step(3, {1, 2, 3}, {4}));
    ASSERT_TRUE(next.next_frame().has_value() && next.next_frame().has_value());
    ++session.epoch;
    const auto again = open();
    EXPECT_EQ(again.cached_tokens(), 4U);
    ASSERT_TRUE(again.has_ended());
    EXPECT_EQ(again.ended().prefill_tokens(), 3U);
    EXPECT_EQ(again.ended().decode_tokens(), 1U);
    EXPECT_EQ(again.ended().frames_in(), 2U);
    EXPECT_EQ(again.ended().frames_out(), 2U);
    EXPECT_GT(again.ended().bytes_out(), 0U);
    EXPECT_EQ(again.ended().hop_index(), 1U);
    EXPECT_EQ(again.ended().shard_id(), "shard-2-4");
    EXPECT_EQ(again.ended().layers().start(), 2U);
    v1::CloseResponse closed;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(session.client(1).close(session.ticket(), closed, refusal).ok());
    EXPECT_EQ(closed.stats().prefill_tokens() + closed.stats().frames_in() + closed.stats().bytes_out(), 0U);
    EXPECT_EQ(closed.stats().hop_index(), 1U);
    EXPECT_FALSE(open().has_ended()) << "a new session";
}

TEST_F(LoneMiddle, AStepThatIsComputedMeanwhileCountsWhereItBegan) {
    middle.control().hold();
    peer.send(first(0, {}, {1, 2, 3}, {}));
    peer.send(step(3, {1, 2, 3}, {4}));
    ASSERT_TRUE(middle.control().wait_held());
    ++session.epoch;
    v1::OpenResponse second;
    std::thread opener([&] { second = open(); });
    // Another repair overtakes it.
    v1::OpenResponse third;
    TestSession newer = session;
    newer.epoch = session.epoch + 1;
    const auto is_open_with = [&](uint64_t epoch) {
        v1::OpenResponse response;
        v1::RefusalDetail refusal;
        TestSession same = session;
        same.epoch = session.epoch - 1;
        EXPECT_FALSE(same.client(1).open(same.open_request(1), response, refusal).ok());
        return refusal.limit() == epoch;  // STALE_EPOCH tells the current one
    };
    ASSERT_TRUE(eventually([&] { return is_open_with(session.epoch); }));
    std::thread overtaker([&] {
        v1::RefusalDetail refusal;
        EXPECT_TRUE(newer.client(1).open(newer.open_request(1), third, refusal).ok());
    });
    ASSERT_TRUE(eventually([&] { return is_open_with(newer.epoch); }));
    middle.control().release();
    opener.join();
    overtaker.join();
    EXPECT_EQ(second.cached_tokens(), 3U);
    EXPECT_EQ(second.ended().prefill_tokens(), 3U);
    EXPECT_EQ(second.ended().decode_tokens(), 0U) << "what waited for the engine was dropped";
    EXPECT_EQ(third.cached_tokens(), 3U);
    EXPECT_TRUE(third.has_ended());
    EXPECT_EQ(third.ended().prefill_tokens(), 0U);
}

TEST_F(LoneMiddle, AnotherPlaceInARouteWithAnotherHead) {
    peer.send(first(0, {}, {1, 2}, {}));
    ASSERT_TRUE(next.next_frame().has_value());
    FakeNeighbour new_head;
    FakeNeighbour new_next;
    TestSession longer({{new_head.address(), described("new-head")},
                        {"127.0.0.1:1", described("between")},
                        middle.address(),
                        {new_next.address(), described("new-next")}},
                       session.id());
    longer.epoch = 2;
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(longer.client(2).open(longer.open_request(2), response, refusal).ok());
    EXPECT_EQ(response.cached_tokens(), 2U);
    EXPECT_EQ(response.ended().hop_index(), 1U);
    session.epoch = 2;
    peer.send(first(2, {1, 2}, {3}, {2, 2, 2, 2}));
    EXPECT_EQ(new_next.next_frame()->step().position(), 2U);
    peer.send(step(9, {}, {3}));
    const auto frame = new_head.next_frame();
    ASSERT_TRUE(frame.has_value() && frame->has_failure());
    EXPECT_EQ(frame->failure().hop_index(), 2U);
    // Broken sessions open again, too.
    longer.epoch = session.epoch = 3;
    ASSERT_TRUE(longer.client(2).open(longer.open_request(2), response, refusal).ok());
    EXPECT_EQ(response.cached_tokens(), 3U);
    peer.send(first(3, {1, 2, 3}, {4}, {}));
    EXPECT_EQ(new_next.next_frame()->step().position(), 3U);
}

TEST(Describe, TellsTheDefaultChunk) {
    WorkerOptions options;
    options.chunk_tokens = 100;
    EXPECT_EQ(Hop("test:6", LayerRange{0, 6}, options).client().describe().chunk_tokens(), 100U);
    options.chunk_tokens = 5000;
    EXPECT_EQ(Hop("test:6", LayerRange{0, 6}, options).client().describe().chunk_tokens(), 512U) << "the step's limit";
}

// ----------------------------------------------------------------------------------------------------------- orphans

class Orphans : public testing::Test {
  protected:
    static constexpr int64_t timeout_us = 10'000'000;

    std::vector<std::unique_ptr<Hop>> hops = make_hops("test:6", {0, 2, 4, 6}, without_connect_timeout());
    TestSession session{addresses(hops)};
    Worker & head = hops[0]->worker();

    void SetUp() override {
        session.open();
    }

    // A time after everything that has happened, and before everything that comes.
    static int64_t mark() {
        const int64_t start = now_us();
        EXPECT_TRUE(eventually([&] { return now_us() > start + 10'000; }));
        return start + 5'000;
    }

    bool open_everywhere() {
        bool all = true;
        for (auto & hop : hops) {
            all = all && hop->worker().status().open_sessions() == 1;
        }
        return all;
    }
    bool closed_everywhere() {
        return eventually([&] {
            uint32_t open = 0;
            for (auto & hop : hops) {
                open += hop->worker().status().open_sessions();
            }
            return open == 0;
        });
    }
};

TEST_F(Orphans, AnOpenSessionWithoutASignOfItsGateway) {
    const int64_t opened = mark();
    head.tick(opened - 10'000 + timeout_us - 5'000'000);
    EXPECT_TRUE(open_everywhere());
    head.tick(opened + timeout_us);
    EXPECT_TRUE(closed_everywhere());
    for (auto & hop : hops) {
        EXPECT_EQ(hop->worker().status().kv_tokens(), 0U);
    }
}

TEST_F(Orphans, AfterAGenerationToo) {
    ASSERT_TRUE(session.generate("abc", 5).finished.has_value());
    head.tick(mark() + timeout_us);
    EXPECT_TRUE(closed_everywhere());
}

TEST_F(Orphans, ATouchIsASign) {
    const int64_t before = mark();
    v1::TouchResponse touched;
    ASSERT_TRUE(session.client(0).touch(session.ticket(), touched).ok());
    EXPECT_TRUE(touched.known());
    head.tick(before + timeout_us);
    EXPECT_TRUE(open_everywhere());
    head.tick(mark() + timeout_us);
    EXPECT_TRUE(closed_everywhere());
    ASSERT_TRUE(session.client(0).touch(session.ticket(), touched).ok());
    EXPECT_FALSE(touched.known());
}

TEST_F(Orphans, ATouchOfAnOlderEpochIsNone) {
    const auto old_ticket = session.ticket();
    session.epoch = 2;
    session.open();
    const int64_t before = mark();
    v1::TouchResponse touched;
    ASSERT_TRUE(session.client(0).touch(old_ticket, touched).ok());
    EXPECT_TRUE(touched.known());
    head.tick(before + timeout_us);
    EXPECT_TRUE(closed_everywhere());
}

TEST_F(Orphans, ARunningGenerationIsNone) {
    hops[0]->control().hold();
    std::thread caller([&] { EXPECT_TRUE(session.generate("abc", 5).finished.has_value()); });
    ASSERT_TRUE(hops[0]->control().wait_held());
    head.tick(mark() + 10 * timeout_us);
    EXPECT_TRUE(open_everywhere());
    const int64_t ended = mark();
    hops[0]->control().release();
    caller.join();
    head.tick(ended + timeout_us);
    EXPECT_TRUE(open_everywhere()) << "its end is a sign";
}

TEST_F(Orphans, ACancelledCallIsNoProof) {
    hops[2]->control().hold();
    grpc::ClientContext context;
    std::thread caller([&] { session.client(0).generate(session.generate_request("abc", 5), {}, &context); });
    ASSERT_TRUE(hops[2]->control().wait_held());
    const int64_t before = mark();
    context.TryCancel();
    caller.join();
    ASSERT_TRUE(eventually(
        [&] { return session.generate("", 1).refusal.message().find("already running") == std::string::npos; }));
    head.tick(before + timeout_us);
    EXPECT_TRUE(open_everywhere());
    head.tick(mark() + timeout_us);
    EXPECT_TRUE(closed_everywhere());
    hops[2]->control().release();
}

TEST_F(Orphans, ABrokenSessionAtTheHead) {
    hops[1]->control().set([](auto & c) { c.failure = {Code::engine_failure, "out of memory"}; });
    ASSERT_TRUE(session.generate("abc", 5).failed.has_value());
    head.tick(mark() + timeout_us);
    EXPECT_TRUE(closed_everywhere());
}

TEST_F(Orphans, TouchChecksTickets) {
    WorkerOptions options;
    options.ticket_key = "secret";
    auto locked = make_hops("test:6", {0, 6}, options);
    v1::TouchResponse touched;
    EXPECT_EQ(locked[0]->client().touch(session.ticket(), touched).error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

}  // namespace
}  // namespace meshnet::test
