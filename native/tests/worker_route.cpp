// Generations over workers in this process, on loopback: one, two and three hops.
#include <grpc/support/cpu.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "tests/worker_support.h"
#include "worker/single_poller.h"

namespace meshnet::test {
namespace {

const std::string prompt = "The quick brown fox jumps over the lazy dog";

struct Split {
    const char * name;
    std::vector<int32_t> cuts;
    const char * model;
};

class EverySplit : public testing::TestWithParam<Split> {};

TEST_P(EverySplit, AnswersLikeAPlainLoop) {
    const auto & split = GetParam();
    auto hops = make_hops(split.model, split.cuts);
    for (const size_t repeat : {size_t{1}, size_t{12}}) {
        std::string text;
        for (size_t i = 0; i < repeat; ++i) {
            text += prompt;
        }
        TestSession session(addresses(hops));
        session.open();
        auto request = session.generate_request(text, 100);
        request.set_ignore_eog(true);
        request.set_chunk_tokens(32);
        const auto outcome = session.client(0).generate(request);
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.error_message();
        ASSERT_TRUE(outcome.finished.has_value());
        EXPECT_EQ(outcome.finished->cause(), v1::FINISH_LENGTH);
        EXPECT_EQ(outcome.finished->generated_tokens(), 100U);
        EXPECT_EQ(outcome.ids(), direct_tokens("test:6", text, 100, {}, true));
        for (size_t i = 0; i < outcome.tokens.size(); ++i) {
            EXPECT_EQ(outcome.tokens[i].position(), text.size() + i);
        }
        ASSERT_FALSE(outcome.prefill.empty());
        EXPECT_EQ(outcome.prefill.back().done_tokens(), text.size());
        session.close();
    }
}

TEST_P(EverySplit, SamplesAlikeWithASeed) {
    const auto & split = GetParam();
    auto hops = make_hops(split.model, split.cuts);
    v1::SamplingParams params;
    params.set_temperature(0.9f);
    params.set_top_k(20);
    params.set_top_p(0.9f);
    params.set_seed(11);
    params.set_penalty_last_n(32);
    params.set_repeat_penalty(1.2f);
    TestSession session(addresses(hops));
    session.open();
    auto request = session.generate_request(prompt, 60);
    *request.mutable_sampling() = params;
    request.set_ignore_eog(true);
    request.set_chunk_tokens(5);
    EXPECT_EQ(session.client(0).generate(request).ids(), direct_tokens("test:6", prompt, 60, params, true));
}

INSTANTIATE_TEST_SUITE_P(Worker, EverySplit,
                         testing::Values(Split{"OneHop", {0, 6}, "test:6"}, Split{"TwoHops", {0, 3, 6}, "test:6"},
                                         Split{"ThreeHops", {0, 1, 5, 6}, "test:6"},
                                         Split{"ThreeHopsTwoTensors", {0, 2, 4, 6}, "test:6:0:2"}),
                         [](const auto & info) { return info.param.name; });

TEST(Route, EndsAtTheEndOfGenerationToken) {
    auto hops = make_hops("test:6", {0, 3, 6});
    int ended = 0;
    for (char c = 'a'; c <= 'f'; ++c) {
        TestSession session(addresses(hops));
        session.open();
        const std::string text = prompt + c;
        const auto outcome = session.generate(text, 400);
        EXPECT_EQ(outcome.ids(), direct_tokens("test:6", text, 400));
        if (outcome.finished->cause() == v1::FINISH_EOG) {
            ++ended;
            EXPECT_TRUE(outcome.tokens.back().is_eog());
            EXPECT_TRUE(outcome.tokens.back().piece().empty());
        }
        session.close();
    }
    EXPECT_GT(ended, 0);
}

TEST(Route, CarriesLogprobs) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.open();
    auto request = session.generate_request(prompt, 5);
    request.mutable_sampling()->set_logprobs(4);
    const auto outcome = session.client(0).generate(request);
    ASSERT_FALSE(outcome.tokens.empty());
    for (const auto & token : outcome.tokens) {
        EXPECT_TRUE(token.has_logprob());
        EXPECT_LE(token.logprob(), 0.0f);
        ASSERT_EQ(token.top_size(), 3);
        EXPECT_EQ(token.top(0).token(), token.token()) << "greedy takes the most likely";
        EXPECT_FLOAT_EQ(token.top(0).logprob(), token.logprob());
        EXPECT_EQ(token.top(0).piece(), token.piece());
    }
}

TEST(Route, FillsTheSessionToItsCapacity) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.token_capacity = static_cast<uint32_t>(prompt.size()) + 10;
    session.open();
    auto request = session.generate_request(prompt, 0);
    request.set_ignore_eog(true);
    const auto outcome = session.client(0).generate(request);
    ASSERT_TRUE(outcome.finished.has_value());
    EXPECT_EQ(outcome.finished->cause(), v1::FINISH_CAPACITY);
    EXPECT_EQ(outcome.tokens.size(), 10U);
}

TEST(Route, ContinuesAConversationFromItsCache) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.open();
    auto request = session.generate_request(prompt, 20);
    request.set_ignore_eog(true);
    const auto first = session.client(0).generate(request);
    const std::string follow_up = " and again";
    // All but the last token of the answer are cached; go on from there.
    std::string history = prompt + first.text();
    PrefixHistory prefix;
    for (const char c : history.substr(0, history.size() - 1)) {
        prefix.append({static_cast<unsigned char>(c)});
    }
    auto second = session.generate_request(history.substr(prefix.length()) + follow_up, 20);
    second.set_cached_tokens(prefix.length());
    second.set_prefix_hash(prefix.hash());
    second.set_ignore_eog(true);
    EXPECT_EQ(session.client(0).generate(second).ids(), direct_tokens("test:6", history + follow_up, 20, {}, true));
    // And from an earlier point: every hop rolls back.
    auto third = session.generate_request("other", 20);
    third.set_cached_tokens(4);
    third.set_prefix_hash(prefix.hash_at(4));
    third.set_ignore_eog(true);
    EXPECT_EQ(session.client(0).generate(third).ids(),
              direct_tokens("test:6", prompt.substr(0, 4) + "other", 20, {}, true));
    const auto closed = session.close();
    EXPECT_EQ(closed[0].stats().prefill_tokens(), closed[1].stats().prefill_tokens());
}

TEST(Route, SessionsAtOnceAnswerAsEachAlone) {
    auto hops = make_hops("test:6", {0, 2, 4, 6});
    constexpr int n = 20;
    std::vector<std::thread> threads;
    std::vector<std::vector<uint32_t>> answers(n);
    for (int i = 0; i < n; ++i) {
        threads.emplace_back([&, i] {
            TestSession session(addresses(hops));
            session.open();
            auto request = session.generate_request(prompt + std::to_string(i), 80);
            request.set_ignore_eog(true);
            request.set_chunk_tokens(8);
            answers[i] = session.client(0).generate(request).ids();
            session.close();
        });
    }
    for (auto & thread : threads) {
        thread.join();
    }
    for (int i = 0; i < n; ++i) {
        EXPECT_EQ(answers[i], direct_tokens("test:6", prompt + std::to_string(i), 80, {}, true)) << i;
    }
    for (auto & hop : hops) {
        EXPECT_EQ(hop->client().status().open_sessions(), 0U);
    }
}

TEST(Route, StatsAddUp) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.open();
    auto request = session.generate_request(prompt, 30);
    request.set_ignore_eog(true);
    request.set_chunk_tokens(10);
    session.client(0).generate(request);
    ASSERT_TRUE(eventually([&] {
        return hops[0]->client().status().decode_tokens() == 29 && hops[1]->client().status().decode_tokens() == 29;
    }));
    const auto closed = session.close();
    const auto & head = closed[0].stats();
    const auto & tail = closed[1].stats();
    const uint64_t frames = (prompt.size() + 9) / 10 + 29;
    EXPECT_TRUE(closed[0].known() && closed[1].known());
    EXPECT_EQ(head.frames_out(), frames);
    EXPECT_EQ(tail.frames_in(), frames);
    EXPECT_EQ(tail.frames_out(), 30U);
    EXPECT_EQ(head.frames_in(), 30U);
    EXPECT_EQ(head.prefill_tokens(), prompt.size());
    EXPECT_EQ(tail.prefill_tokens(), prompt.size());
    EXPECT_EQ(tail.decode_tokens(), 29U);
    EXPECT_GT(head.bytes_out(), frames * 64);
    EXPECT_GE(tail.bytes_in(), head.bytes_out()) << "frame numbers are added on the wire";
    EXPECT_EQ(head.hop_index(), 0U);
    EXPECT_EQ(tail.hop_index(), 1U);
    EXPECT_EQ(tail.shard_id(), "shard-3-6");
    EXPECT_EQ(tail.layers().start(), 3U);
    const auto again = session.close();
    EXPECT_FALSE(again[0].known() || again[1].known());
}

TEST(Route, CancelStopsTheLoopAndTheSessionGoesOn) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.token_capacity = 2048;
    session.open();
    auto request = session.generate_request(prompt, 2000);
    request.set_ignore_eog(true);
    grpc::ClientContext context;
    int seen = 0;
    const auto cancelled = session.client(0).generate(
        request,
        [&](const v1::GenerateEvent & event) {
            if (event.has_token() && ++seen == 3) {
                context.TryCancel();
            }
        },
        &context);
    EXPECT_EQ(cancelled.status.error_code(), grpc::StatusCode::CANCELLED);
    EXPECT_FALSE(cancelled.finished.has_value());
    // Both hops come to rest, long before 2,000 tokens.
    uint64_t last = 0;
    ASSERT_TRUE(eventually([&] {
        const uint64_t steps = hops[0]->control().executed_steps() + hops[1]->control().executed_steps();
        return std::exchange(last, steps) == steps && hops[0]->worker().status().queued_frames() == 0;
    }));
    EXPECT_LT(hops[1]->worker().status().decode_tokens(), 1990U);
    // The same session answers again, from its beginning.
    auto retry = session.generate_request(prompt, 20);
    retry.set_ignore_eog(true);
    Outcome outcome;
    ASSERT_TRUE(eventually([&] {
        outcome = session.client(0).generate(retry);
        return outcome.status.ok();  // refused while the cancellation is on its way
    }));
    EXPECT_EQ(outcome.ids(), direct_tokens("test:6", prompt, 20, {}, true));
}

TEST(Route, ATokenOfACancelledGenerationIsNotTakenForTheNext) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.open();
    // The first generation's token is stuck at the tail when it is cancelled; the next one asks for the same position.
    hops[1]->control().hold();
    grpc::ClientContext context;
    std::thread first([&] { session.client(0).generate(session.generate_request(prompt, 5), {}, &context); });
    ASSERT_TRUE(hops[1]->control().wait_held());
    context.TryCancel();
    first.join();
    std::string other = prompt;
    other[0] = 'X';
    Outcome outcome;
    std::thread second([&] {
        eventually([&] {
            outcome = session.client(0).generate(session.generate_request(other, 5));
            return outcome.refusal.refusal() != v1::REFUSAL_BAD_REQUEST;
        });
    });
    ASSERT_TRUE(eventually([&] { return hops[0]->control().executed_steps() == 2; }));
    hops[1]->control().release();
    second.join();
    EXPECT_EQ(outcome.ids(), direct_tokens("test:6", other, 5));
}

TEST(Route, ASlowReaderPausesOnlyItsOwnSession) {
    std::vector<std::unique_ptr<Hop>> hops;
    hops.push_back(std::make_unique<Hop>("test:2", LayerRange{0, 2}, WorkerOptions{}, 4, 131072));
    TestSession slow(addresses(hops));
    slow.token_capacity = 131072;
    slow.open();
    auto request = slow.generate_request(prompt, 0);
    request.set_ignore_eog(true);
    request.mutable_sampling()->set_logprobs(21);
    grpc::ClientContext context;
    auto reader = slow.client(0).stub().Generate(&context, request);
    v1::GenerateEvent event;
    ASSERT_TRUE(reader->Read(&event));  // ... and no further
    uint64_t slow_tokens = 0;
    ASSERT_TRUE(eventually([&] {
        const uint64_t before = hops[0]->worker().status().decode_tokens();
        TestSession quick(addresses(hops));
        quick.open();
        auto short_request = quick.generate_request(prompt, 100);
        short_request.set_ignore_eog(true);
        EXPECT_EQ(quick.client(0).generate(short_request).tokens.size(), 100U);
        quick.close();
        slow_tokens = hops[0]->worker().status().decode_tokens() - before - 99;
        return slow_tokens == 0;
    }));
    EXPECT_LT(hops[0]->worker().status().kv_tokens(), 131000U) << "it must have paused, not finished";
    // It goes on when it is read again.
    const uint64_t paused_at = hops[0]->worker().status().kv_tokens();
    ASSERT_TRUE(eventually([&] {
        EXPECT_TRUE(reader->Read(&event));
        return hops[0]->worker().status().kv_tokens() > paused_at;
    }));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST(Route, LongVocabularyCallsHoldNobodyUp) {
    auto hops = make_hops("test:6", {0, 3, 6});
    auto & control = hops[0]->control();
    control.set([](auto & c) { c.vocabulary_held = true; });
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
        callers.emplace_back([&] {
            v1::TokenizeRequest request;
            request.mutable_ticket()->set_session_id(std::string(16, 'x'));
            request.set_text("ab");
            v1::TokenizeResponse response;
            grpc::ClientContext context;
            EXPECT_TRUE(hops[0]->client().stub().Tokenize(&context, request, &response).ok());
            EXPECT_EQ(response.tokens_size(), 2);
        });
    }
    EXPECT_TRUE(eventually([&] {
        std::lock_guard lock(control.mutex);
        return control.vocabulary_waiting > 0;
    }));
    TestSession session(addresses(hops));
    session.open();
    EXPECT_EQ(session.generate(prompt, 20).ids(), direct_tokens("test:6", prompt, 20));
    session.close();
    control.release();
    for (auto & caller : callers) {
        caller.join();
    }
}

TEST(Route, CloseWhileAStepIsComputedIsSafe) {
    auto hops = make_hops("test:6", {0, 6});
    hops[0]->control().hold();
    TestSession session(addresses(hops));
    session.open();
    Outcome outcome;
    std::thread caller([&] { outcome = session.generate(prompt, 5); });
    ASSERT_TRUE(hops[0]->control().wait_held());
    EXPECT_TRUE(session.close()[0].known());
    caller.join();
    ASSERT_TRUE(outcome.failed.has_value());
    EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_CANCELLED);
    EXPECT_EQ(hops[0]->client().status().open_sessions(), 0U);
    hops[0]->control().release();
    TestSession next(addresses(hops));
    next.open();
    EXPECT_EQ(next.generate(prompt, 5).ids(), direct_tokens("test:6", prompt, 5));
}

TEST(Route, SlotsAreReusedWhileAClosedSessionStillComputes) {
    std::vector<std::unique_ptr<Hop>> hops;
    hops.push_back(std::make_unique<Hop>("test:6", LayerRange{0, 6}, WorkerOptions{}, 1));
    for (int i = 0; i < 5; ++i) {
        hops[0]->control().hold();
        TestSession session(addresses(hops));
        session.open();
        std::thread caller([&] { session.generate(prompt, 5); });
        ASSERT_TRUE(hops[0]->control().wait_held());
        session.close();
        caller.join();
        TestSession next(addresses(hops));
        next.open();
        std::vector<uint32_t> ids;
        std::thread next_caller([&] { ids = next.generate(prompt, 5).ids(); });
        hops[0]->control().release();
        next_caller.join();
        EXPECT_EQ(ids, direct_tokens("test:6", prompt, 5));
        next.close();
    }
}

TEST(SinglePoller, LeavesOneThreadThatAnswers) {
    v1::Shard::CallbackService service;  // knows no call
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    const auto server = builder.BuildAndStart();
    ASSERT_NE(server, nullptr);
    const SinglePoller poller;
    EXPECT_EQ(poller.waiting(), static_cast<int>(std::clamp(gpr_cpu_num_cores() / 2, 2U, 16U)) - 1) << "of gRPC 1.51";
    const SinglePoller another;
    EXPECT_EQ(another.waiting(), poller.waiting());
    const auto stub = v1::Shard::NewStub(
        grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::StatusResponse response;
    EXPECT_EQ(stub->Status(&context, {}, &response).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST(Route, DrainsWhenTheLastSessionCloses) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.open();
    hops[0]->worker().drain();
    EXPECT_TRUE(hops[0]->client().status().draining());
    EXPECT_FALSE(hops[0]->worker().wait_drained(0));
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    TestSession late(addresses(hops));
    EXPECT_EQ(late.client(0).open(late.open_request(0), response, refusal).error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_EQ(refusal.refusal(), v1::REFUSAL_DRAINING);
    EXPECT_EQ(session.generate(prompt, 10).ids(), direct_tokens("test:6", prompt, 10)) << "open sessions still work";
    session.close();
    EXPECT_TRUE(hops[0]->worker().wait_drained(deadline_ms));
}

}  // namespace
}  // namespace meshnet::test
