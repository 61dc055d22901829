// What peers may send, and what becomes of them: malformed, stale, too many, unknown.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/worker_support.h"
#include "worker/clock.h"

namespace meshnet::test {
namespace {

// A tail whose head and previous hop the test plays.
class LoneTail : public testing::Test {
  protected:
    Hop tail{"test:6", LayerRange{3, 6}};
    FakeNeighbour head;
    SeamPeer peer{tail.address().address};
    TestSession session{{{head.address(), head_description()}, tail.address()}};

    static v1::DescribeResponse head_description() {
        v1::DescribeResponse description;
        description.set_shard_id("fake-head");
        return description;
    }

    void SetUp() override {
        open(session);
    }

    void open(TestSession & opened) {
        v1::OpenResponse response;
        v1::RefusalDetail refusal;
        ASSERT_TRUE(opened.client(1).open(opened.open_request(1), response, refusal).ok());
    }

    v1::SeamFrame good(uint32_t position, const std::vector<uint32_t> & prefix,
                       const std::vector<uint32_t> & tokens) const {
        auto frame = step_frame(session.id(), session.epoch, position, prefix, tokens);
        frame.mutable_step()->add_sample_at(static_cast<uint32_t>(tokens.size()) - 1);
        return frame;
    }

    // The tail's failure report, which must name the tail itself.
    v1::Refusal reported() {
        const auto frame = head.next_frame();
        if (!frame.has_value() || !frame->has_failure()) {
            ADD_FAILURE() << "no failure frame came";
            return v1::REFUSAL_UNSPECIFIED;
        }
        EXPECT_EQ(frame->session_id(), session.id());
        EXPECT_EQ(frame->epoch(), session.epoch);
        EXPECT_EQ(frame->failure().hop_index(), 1U);
        EXPECT_EQ(frame->failure().shard_id(), "shard-3-6");
        return frame->failure().refusal();
    }

    // A new epoch, so that the next test step starts clean.
    void reopen() {
        ++session.epoch;
        open(session);
    }
};

TEST_F(LoneTail, AnswersAGoodStep) {
    const auto number = peer.send(good(0, {}, {1, 2, 3}));
    const auto credit = peer.credit();
    ASSERT_TRUE(credit.has_value());
    EXPECT_EQ(credit->frame_no(), number);
    EXPECT_EQ(credit->refused(), v1::REFUSAL_UNSPECIFIED);
    const auto answer = head.next_frame();
    ASSERT_TRUE(answer.has_value() && answer->has_sampled());
    ASSERT_EQ(answer->sampled().tokens_size(), 1);
    EXPECT_EQ(answer->sampled().tokens(0).position(), 3U);
}

TEST_F(LoneTail, GivesCreditForDecodeStepsTogether) {
    std::vector<uint32_t> prefix = {1, 2, 3};
    auto opening = good(0, {}, prefix);
    opening.mutable_step()->set_prefill(true);
    peer.send(opening);
    ASSERT_TRUE(peer.credit().has_value());
    EXPECT_EQ(peer.messages(), 1U);
    constexpr int rounds = 20;
    constexpr uint32_t at_once = session_window_frames - 1;
    for (int round = 0; round < rounds; ++round) {
        for (uint32_t i = 0; i < at_once; ++i) {
            auto frame = good(static_cast<uint32_t>(prefix.size()), prefix, {i});
            frame.mutable_step()->clear_sampling();
            peer.send(frame);
            prefix.push_back(i);
        }
        for (uint32_t i = 0; i < at_once; ++i) {
            const auto credit = peer.credit();
            ASSERT_TRUE(credit.has_value());
            EXPECT_EQ(credit->frame_no(), 2U + static_cast<uint32_t>(round) * at_once + i);
        }
    }
    EXPECT_LT(peer.messages(), size_t{rounds} * at_once);
    auto last = good(static_cast<uint32_t>(prefix.size()), prefix, {7});
    last.mutable_step()->clear_sampling();
    peer.send(last);
    EXPECT_TRUE(peer.credit().has_value()) << "though nothing follows";
}

TEST_F(LoneTail, ForgetsNoCreditThatWaits) {
    // Ticks flush what waits; one that comes between a credit's announcement and the credit must not lose it.
    std::atomic<bool> done = false;
    std::thread housekeeping([&] {
        while (!done) {
            tail.worker().tick(now_us());
        }
    });
    std::vector<uint32_t> prefix;
    bool given = true;
    for (uint32_t i = 0; given && i < 1500; ++i) {
        auto frame = good(i, prefix, {i % 200});
        if (i > 0) {
            frame.mutable_step()->clear_sampling();
        }
        peer.send(frame);
        prefix.push_back(i % 200);
        if (i % 2 == 1) {  // the first one waits when the second one is given
            given = peer.credit().has_value() && peer.credit().has_value();
        }
    }
    done = true;
    housekeeping.join();
    EXPECT_TRUE(given) << "the stream ended after " << prefix.size() << " frames";
}

TEST_F(LoneTail, SamplesAtSeveralPositionsAndRollsBack) {
    auto frame = good(0, {}, {1, 2, 3, 4});
    frame.mutable_step()->clear_sample_at();
    for (const uint32_t at : {1U, 2U, 3U}) {
        frame.mutable_step()->add_sample_at(at);
    }
    peer.send(frame);
    const auto many = head.next_frame();
    ASSERT_TRUE(many.has_value());
    ASSERT_EQ(many->sampled().tokens_size(), 3);
    auto again = good(2, {1, 2}, {3});
    again.mutable_step()->set_rollback(true);
    peer.send(again);
    const auto one = head.next_frame();
    ASSERT_TRUE(one.has_value());
    EXPECT_EQ(one->sampled().tokens(0).token(), many->sampled().tokens(1).token()) << "same prefix, same token";
}

TEST_F(LoneTail, RefusesMalformedStepsByName) {
    const std::vector<std::function<void(v1::SeamFrame &)>> malformations = {
        [](auto & f) { f.mutable_step()->clear_tokens(); },
        [](auto & f) { f.mutable_step()->set_tokens(0, 9999); },
        [](auto & f) { f.mutable_step()->add_sample_at(77); },
        [](auto & f) { f.mutable_step()->clear_boundary(); },
        [](auto & f) { f.mutable_step()->mutable_boundary(0)->mutable_data()->resize(1); },
        [](auto & f) { f.mutable_step()->mutable_boundary(0)->mutable_data()->assign(3 * 64, '\xff'); },
        [](auto & f) { f.mutable_step()->mutable_sampling()->set_min_p(-3); },
        [](auto & f) { f.mutable_step()->clear_sampling(); },  // nothing to sample with
        [](auto & f) { f.mutable_sampled()->add_tokens(); },   // sampled frames go to the head
        [](auto & f) { f.clear_step(); },                      // no body
    };
    for (const auto & malform : malformations) {
        auto frame = good(0, {}, {1, 2, 3});
        malform(frame);
        peer.send(frame);
        EXPECT_EQ(reported(), v1::REFUSAL_BAD_REQUEST);
        EXPECT_TRUE(peer.credit().has_value());
        reopen();
    }
    auto frame = good(0, {}, {1, 2, 3});
    frame.mutable_step()->set_rollback(true);
    peer.send(frame);
    EXPECT_TRUE(head.next_frame()->has_sampled()) << "the stream and the session still work";
}

TEST_F(LoneTail, RefusesAPrefixThatIsNotItsOwn) {
    peer.send(good(0, {}, {1, 2, 3}));
    ASSERT_TRUE(head.next_frame()->has_sampled());
    peer.send(good(3, {1, 2, 4}, {5}));  // right length, other token
    EXPECT_EQ(reported(), v1::REFUSAL_PREFIX_MISMATCH);
    reopen();
    peer.send(good(4, {1, 2, 3, 4}, {5}));  // a gap
    EXPECT_EQ(reported(), v1::REFUSAL_PREFIX_MISMATCH);
    reopen();
    peer.send(good(2, {1, 2}, {5}));  // an overlap without rollback
    EXPECT_EQ(reported(), v1::REFUSAL_PREFIX_MISMATCH);
    reopen();
    auto ahead = good(9, std::vector<uint32_t>(9, 1), {5});  // a rollback forwards
    ahead.mutable_step()->set_rollback(true);
    peer.send(ahead);
    EXPECT_EQ(reported(), v1::REFUSAL_PREFIX_MISMATCH);
    reopen();
    peer.send(good(3, {1, 2, 3}, {5}));
    EXPECT_TRUE(head.next_frame()->has_sampled()) << "the cache is as it was";
}

TEST_F(LoneTail, RefusesMoreTokensThanTheSessionHolds) {
    session.token_capacity = 4;
    reopen();
    peer.send(good(0, {}, {1, 2, 3, 4, 5}));
    EXPECT_EQ(reported(), v1::REFUSAL_TOO_LONG);
}

TEST_F(LoneTail, DropsStaleEpochsSilently) {
    const auto stale = good(0, {}, {1});
    reopen();
    peer.send(stale);
    const auto credit = peer.credit();
    ASSERT_TRUE(credit.has_value());
    EXPECT_EQ(credit->refused(), v1::REFUSAL_UNSPECIFIED);
    EXPECT_EQ(tail.client().status().refused_frames(), 1U);
    EXPECT_EQ(tail.client().status().prefill_tokens() + tail.client().status().decode_tokens(), 0U);
    peer.send(good(0, {}, {1}));
    EXPECT_TRUE(head.next_frame()->has_sampled()) << "nothing was reported for the stale frame";
}

TEST_F(LoneTail, AnswersForUnknownSessionsInTheCredit) {
    auto frame = good(0, {}, {1});
    frame.set_session_id(std::string(16, '?'));
    peer.send(frame);
    EXPECT_EQ(peer.credit()->refused(), v1::REFUSAL_UNKNOWN_SESSION);
    frame = good(0, {}, {1});
    frame.set_epoch(session.epoch + 1);  // not opened here yet
    peer.send(frame);
    EXPECT_EQ(peer.credit()->refused(), v1::REFUSAL_UNKNOWN_SESSION);
}

TEST_F(LoneTail, RefusesMoreFramesThanTheWindowAndOnlyThatSession) {
    TestSession other({{head.address(), head_description()}, tail.address()});
    open(other);
    tail.control().hold();
    std::vector<uint32_t> prefix;
    for (uint32_t i = 0; i < session_window_frames; ++i) {
        peer.send(good(i, prefix, {7}));
        prefix.push_back(7);
    }
    ASSERT_TRUE(tail.control().wait_held());
    auto innocent = step_frame(other.id(), 1, 0, {}, {1});
    innocent.mutable_step()->add_sample_at(0);
    peer.send(innocent);
    peer.send(good(session_window_frames, prefix, {7}));
    EXPECT_EQ(reported(), v1::REFUSAL_FLOW_CONTROL);
    tail.control().release();
    const auto answer = head.next_frame();
    ASSERT_TRUE(answer.has_value() && answer->has_sampled());
    EXPECT_EQ(answer->session_id(), other.id());
    for (uint32_t i = 0; i < session_window_frames + 2; ++i) {
        EXPECT_TRUE(peer.credit().has_value()) << "every frame is credited";
    }
}

TEST_F(LoneTail, AFrameThatNamesNoSessionEndsTheStream) {
    SeamPeer bad(tail.address().address);
    auto frame = good(0, {}, {1});
    frame.set_session_id("short");
    bad.send(frame);
    const auto status = bad.finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    SeamPeer garbage(tail.address().address);
    garbage.send_raw("\xff\xff\xff\xff no frame at all");
    EXPECT_EQ(garbage.finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    peer.send(good(0, {}, {1, 2, 3}));
    EXPECT_TRUE(head.next_frame()->has_sampled()) << "other streams do not care";
}

TEST_F(LoneTail, ABrokenInboundStreamIsReportedToTheHead) {
    TestSession longer({{head.address(), head_description()}, {"127.0.0.1:1", {}}, tail.address()});
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(longer.client(2).open(longer.open_request(2), response, refusal).ok());
    {
        SeamPeer doomed(tail.address().address);
        auto frame = step_frame(longer.id(), 1, 0, {}, {1, 2, 3});
        frame.mutable_step()->add_sample_at(2);
        doomed.send(frame);
        ASSERT_TRUE(head.next_frame()->has_sampled());
    }
    const auto frame = head.next_frame();
    ASSERT_TRUE(frame.has_value() && frame->has_failure());
    EXPECT_EQ(frame->session_id(), longer.id());
    EXPECT_EQ(frame->failure().refusal(), v1::REFUSAL_PEER_LOST);
    EXPECT_EQ(frame->failure().hop_index(), 1U);
}

TEST_F(LoneTail, ASenderThatClosesItsStreamIsNotLost) {
    {
        SeamPeer polite(tail.address().address);
        polite.send(good(0, {}, {1, 2, 3}));
        ASSERT_TRUE(head.next_frame()->has_sampled());
        EXPECT_TRUE(polite.finish().ok());
    }
    peer.send(good(3, {1, 2, 3}, {4}));
    EXPECT_TRUE(head.next_frame()->has_sampled());
}

// ----------------------------------------------------------------------------------------------------- the head

TEST(LoneHead, DoesNotTakeTokensItDidNotAskFor) {
    Hop hop("test:6", LayerRange{0, 3});
    FakeNeighbour tail;
    v1::DescribeResponse tail_description;
    tail_description.set_shard_id("fake-tail");
    TestSession session({hop.address(), {tail.address(), tail_description}});
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    const auto run = [&](const std::function<void(v1::SeamFrame &)> & spoil) {
        ++session.epoch;
        EXPECT_TRUE(session.client(0).open(session.open_request(0), response, refusal).ok());
        Outcome outcome;
        std::thread caller([&] { outcome = session.generate("abc", 1); });
        EXPECT_TRUE(tail.next_frame().has_value());
        v1::SeamFrame frame;
        frame.set_session_id(session.id());
        frame.set_epoch(session.epoch);
        frame.mutable_sampled()->add_tokens()->set_position(3);
        frame.mutable_sampled()->mutable_tokens(0)->set_token('x');
        frame.mutable_sampled()->mutable_tokens(0)->set_piece("x");
        spoil(frame);
        SeamPeer peer(hop.address().address);
        peer.send(frame);
        caller.join();
        return outcome;
    };
    EXPECT_EQ(run([](auto &) {}).text(), "x");
    const std::vector<std::function<void(v1::SeamFrame &)>> spoils = {
        [](auto & f) { f.mutable_sampled()->mutable_tokens(0)->set_position(4); },
        [](auto & f) { f.mutable_sampled()->mutable_tokens(0)->set_token(258); },
        [](auto & f) { f.mutable_sampled()->clear_tokens(); },
        [](auto & f) { *f.mutable_sampled()->add_tokens() = f.sampled().tokens(0); },
        [](auto & f) { f.mutable_step()->add_tokens(1); },
    };
    for (const auto & spoil : spoils) {
        const auto outcome = run(spoil);
        ASSERT_TRUE(outcome.failed.has_value());
        EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_BAD_REQUEST);
        EXPECT_TRUE(outcome.tokens.empty());
    }
    const auto reported = run([](auto & f) {
        f.mutable_failure()->set_refusal(v1::REFUSAL_ENGINE_FAILURE);
        f.mutable_failure()->set_hop_index(1);
        f.mutable_failure()->set_message("out of luck\x01");
        f.mutable_failure()->set_shard_id("fake-tail");
    });
    ASSERT_TRUE(reported.failed.has_value());
    EXPECT_EQ(reported.failed->refusal(), v1::REFUSAL_ENGINE_FAILURE);
    EXPECT_EQ(reported.failed->hop_index(), 1U);
    EXPECT_EQ(reported.failed->message(), "out of luck?");
}

TEST(LoneHead, LosesANeighbourThatGivesCreditTwice) {
    Hop hop("test:6", LayerRange{0, 3});
    FakeNeighbour tail;
    tail.give_credit(2);
    v1::DescribeResponse tail_description;
    tail_description.set_shard_id("fake-tail");
    TestSession session({hop.address(), {tail.address(), tail_description}});
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(session.client(0).open(session.open_request(0), response, refusal).ok());
    const auto outcome = session.generate("x", 1);
    ASSERT_TRUE(outcome.failed.has_value());
    EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_PEER_LOST);
    EXPECT_EQ(outcome.failed->hop_index(), 1U);
}

TEST(LoneHead, KeepsToTheWindow) {
    Hop hop("test:6", LayerRange{0, 3});
    FakeNeighbour tail;
    tail.give_credit(0);
    v1::DescribeResponse tail_description;
    tail_description.set_shard_id("fake-tail");
    TestSession session({hop.address(), {tail.address(), tail_description}});
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(session.client(0).open(session.open_request(0), response, refusal).ok());
    grpc::ClientContext context;
    std::thread caller([&] {
        auto request = session.generate_request(std::string(100, 'x'), 1);
        request.set_chunk_tokens(10);
        session.client(0).generate(request, {}, &context);
    });
    for (uint32_t i = 0; i < session_window_frames; ++i) {
        ASSERT_TRUE(tail.next_frame().has_value());
    }
    // Another session goes on, through the same stream; after it no further frame of the first has come.
    TestSession other({hop.address(), {tail.address(), tail_description}});
    ASSERT_TRUE(other.client(0).open(other.open_request(0), response, refusal).ok());
    grpc::ClientContext other_context;
    std::thread other_caller([&] { other.client(0).generate(other.generate_request("y", 1), {}, &other_context); });
    const auto frame = tail.next_frame();
    ASSERT_TRUE(frame.has_value());
    EXPECT_EQ(frame->session_id(), other.id());
    EXPECT_EQ(hop.control().executed_steps(), session_window_frames + 1);
    context.TryCancel();
    other_context.TryCancel();
    caller.join();
    other_caller.join();
}

// ---------------------------------------------------------------------------------------------- failures in a route

class BrokenRoute : public testing::Test {
  protected:
    std::vector<std::unique_ptr<Hop>> hops = make_hops("test:6", {0, 2, 4, 6});
    TestSession session{addresses(hops)};

    void SetUp() override {
        session.open();
    }

    void expect_failed(const Outcome & outcome, v1::Refusal refusal, uint32_t hop) {
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.error_message();
        ASSERT_TRUE(outcome.failed.has_value());
        EXPECT_EQ(outcome.failed->refusal(), refusal) << outcome.failed->message();
        EXPECT_EQ(outcome.failed->hop_index(), hop);
        EXPECT_EQ(outcome.failed->shard_id(), addresses(hops)[hop].description.shard_id());
        EXPECT_FALSE(outcome.failed->message().empty());
    }
};

TEST_F(BrokenRoute, AnEngineFailureNamesItsHop) {
    for (uint32_t hop = 0; hop < 3; ++hop) {
        hops[hop]->control().set([](auto & c) { c.failure = {Code::engine_failure, "out of memory"}; });
        expect_failed(session.generate("abc", 5), v1::REFUSAL_ENGINE_FAILURE, hop);
        expect_failed(session.generate("abc", 5), v1::REFUSAL_ENGINE_FAILURE, hop);  // the epoch stays broken
        hops[hop]->control().set([](auto & c) { c.failure = {}; });
        ++session.epoch;
        session.open();
        EXPECT_EQ(session.generate("abc", 5).ids(), direct_tokens("test:6", "abc", 5));
    }
}

TEST_F(BrokenRoute, AnExceptionInTheEngineIsAFailure) {
    hops[1]->control().set([](auto & c) { c.throws = true; });
    expect_failed(session.generate("abc", 5), v1::REFUSAL_ENGINE_FAILURE, 1);
    hops[1]->control().set([](auto & c) { c.throws = false; });
    ++session.epoch;
    EXPECT_EQ(session.open()[1].cached_tokens(), 0U);
    EXPECT_EQ(session.generate("abc", 5).ids(), direct_tokens("test:6", "abc", 5));
}

TEST_F(BrokenRoute, AModelThatCannotRollBackSaysSo) {
    ASSERT_TRUE(session.generate("abcdef", 5).finished.has_value());
    hops[1]->control().set([](auto & c) { c.no_rollback = true; });
    PrefixHistory prefix;
    prefix.append({'a', 'b'});
    auto request = session.generate_request("x", 5);
    request.set_cached_tokens(2);
    request.set_prefix_hash(prefix.hash());
    expect_failed(session.client(0).generate(request), v1::REFUSAL_NO_ROLLBACK, 1);
    ++session.epoch;
    session.open();
    EXPECT_EQ(session.generate("xyz", 5).ids(), direct_tokens("test:6", "xyz", 5)) << "to the beginning always works";
}

TEST_F(BrokenRoute, AHopWithoutTheSessionIsNamed) {
    for (const uint32_t hop : {2U, 1U}) {
        v1::CloseResponse response;
        v1::RefusalDetail refusal;
        ASSERT_TRUE(session.client(hop).close(session.ticket(), response, refusal).ok());
        expect_failed(session.generate("abc", 5), v1::REFUSAL_UNKNOWN_SESSION, hop);
        ++session.epoch;
        session.open();
    }
}

TEST_F(BrokenRoute, AHopThatGoesAwayIsNamed) {
    hops[1]->control().hold();
    Outcome outcome;
    std::thread caller([&] { outcome = session.generate("abc", 5); });
    ASSERT_TRUE(hops[1]->control().wait_held());
    const auto name = addresses(hops)[1];
    hops[1]->stop();
    caller.join();
    ASSERT_TRUE(outcome.failed.has_value());
    EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_PEER_LOST);
    EXPECT_EQ(outcome.failed->hop_index(), 1U);
    EXPECT_EQ(outcome.failed->shard_id(), name.description.shard_id());
}

TEST(DeadAddress, IsReportedAsLost) {
    std::vector<HopAddress> route;
    Hop head("test:6", LayerRange{0, 3});
    route.push_back(head.address());
    {
        Hop gone("test:6", LayerRange{3, 6});
        route.push_back(gone.address());
    }
    TestSession session(route);
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(session.client(0).open(session.open_request(0), response, refusal).ok())
        << "connects in the background";
    const auto outcome = session.generate("abc", 5);
    ASSERT_TRUE(outcome.failed.has_value());
    EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_PEER_LOST);
    EXPECT_EQ(outcome.failed->hop_index(), 1U);
    EXPECT_EQ(outcome.failed->shard_id(), "shard-3-6");
}

}  // namespace
}  // namespace meshnet::test
