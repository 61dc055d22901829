// Every refusal by name, and what a re-opened session keeps.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "tests/worker_support.h"
#include "worker/clock.h"
#include "worker/convert.h"

namespace meshnet::test {
namespace {

const std::string prompt = "refuse me not";

v1::RefusalDetail open_refusal(const HopClient & client, const v1::OpenRequest & request,
                               grpc::StatusCode expected_code) {
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    const auto status = client.open(request, response, refusal);
    EXPECT_EQ(status.error_code(), expected_code) << status.error_message();
    EXPECT_EQ(status.error_message(), refusal.message());
    EXPECT_FALSE(refusal.message().empty());
    return refusal;
}

class OpenRefusals : public testing::Test {
  protected:
    std::vector<std::unique_ptr<Hop>> hops = make_hops("test:6", {0, 3, 6});
    TestSession session{addresses(hops)};

    v1::Refusal refused(size_t hop, const std::function<void(v1::OpenRequest &)> & spoil, grpc::StatusCode code) {
        auto request = session.open_request(hop);
        spoil(request);
        const auto refusal = open_refusal(session.client(hop), request, code).refusal();
        EXPECT_EQ(hops[hop]->client().status().open_sessions(), 0U);
        return refusal;
    }
};

TEST_F(OpenRefusals, NameWhatDoesNotMatch) {
    constexpr auto precondition = grpc::StatusCode::FAILED_PRECONDITION;
    constexpr auto invalid = grpc::StatusCode::INVALID_ARGUMENT;
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.set_artifact_digest("sha256:other"); }, precondition),
              v1::REFUSAL_WRONG_ARTIFACT);
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.set_compatibility_id("other"); }, precondition),
              v1::REFUSAL_WRONG_BUILD);
    EXPECT_EQ(refused(
                  1, [](auto & r) { r.mutable_layers()->set_start(2); }, precondition),
              v1::REFUSAL_WRONG_LAYERS);
    EXPECT_EQ(refused(
                  1, [](auto & r) { r.set_boundary_in_digest("x"); }, precondition),
              v1::REFUSAL_INCOMPATIBLE_BOUNDARY);
    EXPECT_EQ(refused(
                  1, [](auto & r) { r.set_boundary_out_digest("x"); }, precondition),
              v1::REFUSAL_INCOMPATIBLE_BOUNDARY);
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.set_token_capacity(2049); }, invalid),
              v1::REFUSAL_TOO_LONG);
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.set_token_capacity(0); }, invalid),
              v1::REFUSAL_TOO_LONG);
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.mutable_ticket()->set_session_id("short"); }, invalid),
              v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.set_hop_index(1); }, invalid),
              v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.set_n_hops(1); }, invalid),
              v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(refused(
                  1, [](auto & r) { r.set_n_hops(3); }, invalid),
              v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.clear_next(); }, invalid),
              v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(refused(
                  0, [](auto & r) { r.mutable_next()->set_address("unix:/tmp/x"); }, invalid),
              v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(refused(
                  1, [](auto & r) { r.clear_head(); }, invalid),
              v1::REFUSAL_BAD_REQUEST);
}

TEST_F(OpenRefusals, LimitsSayWhatIsAllowed) {
    auto request = session.open_request(0);
    request.set_token_capacity(4000);
    const auto refusal = open_refusal(session.client(0), request, grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(refusal.requested(), 4000U);
    EXPECT_EQ(refusal.limit(), 2048U);
}

TEST(Refusals, NoCapacityWhenAllSlotsAreTaken) {
    std::vector<std::unique_ptr<Hop>> hops;
    hops.push_back(std::make_unique<Hop>("test:6", LayerRange{0, 6}, WorkerOptions{}, 2));
    TestSession first(addresses(hops));
    TestSession second(addresses(hops));
    TestSession third(addresses(hops));
    first.open();
    second.open();
    const auto refusal = open_refusal(third.client(0), third.open_request(0), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(refusal.refusal(), v1::REFUSAL_NO_CAPACITY);
    EXPECT_EQ(refusal.limit(), 2U);
    first.close();
    third.open();
}

TEST(Refusals, TicketsAreCheckedOnEveryCall) {
    WorkerOptions options;
    options.ticket_key = "secret";
    auto hops = make_hops("test:6", {0, 6}, options);
    TestSession session(addresses(hops));
    const auto refusal = open_refusal(session.client(0), session.open_request(0), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_EQ(refusal.refusal(), v1::REFUSAL_BAD_TICKET);
    EXPECT_EQ(session.generate(prompt, 1).status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
    v1::CloseResponse closed;
    v1::RefusalDetail detail;
    EXPECT_EQ(session.client(0).close(session.ticket(), closed, detail).error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
    grpc::ClientContext tokenize_context;
    v1::TokenizeResponse tokens;
    EXPECT_EQ(session.client(0).stub().Tokenize(&tokenize_context, {}, &tokens).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(session.client(0).describe().n_layer(), 6U) << "needs no ticket";
}

TEST(Refusals, Vocabulary) {
    auto hops = make_hops("test:6", {3, 6});
    const auto & stub = hops[0]->client().stub();
    v1::TokenizeRequest request;
    request.mutable_ticket()->set_session_id(std::string(16, 'x'));
    request.set_text("hi<eos>");
    request.set_add_special(true);
    request.set_parse_special(true);
    v1::TokenizeResponse tokens;
    grpc::ClientContext context;
    ASSERT_TRUE(const_cast<v1::Shard::Stub &>(stub).Tokenize(&context, request, &tokens).ok());
    EXPECT_EQ(std::vector<uint32_t>(tokens.tokens().begin(), tokens.tokens().end()),
              (std::vector<uint32_t>{256, 'h', 'i', 257}));
    v1::DetokenizeRequest back;
    *back.mutable_ticket() = request.ticket();
    *back.mutable_tokens() = tokens.tokens();
    v1::DetokenizeResponse pieces;
    grpc::ClientContext back_context;
    ASSERT_TRUE(const_cast<v1::Shard::Stub &>(stub).Detokenize(&back_context, back, &pieces).ok());
    ASSERT_EQ(pieces.pieces_size(), 4);
    EXPECT_EQ(pieces.pieces(1), "h");
    EXPECT_EQ(pieces.pieces(3), "");
    back.add_tokens(258);
    grpc::ClientContext bad_context;
    v1::DetokenizeResponse none;
    EXPECT_EQ(const_cast<v1::Shard::Stub &>(stub).Detokenize(&bad_context, back, &none).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
}

TEST(Refusals, GenerateNamesWhatIsWrong) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    const auto refusal_of = [&](const v1::GenerateRequest & request, size_t hop = 0) {
        const auto outcome = session.client(hop).generate(request);
        EXPECT_FALSE(outcome.status.ok());
        EXPECT_TRUE(outcome.tokens.empty() && !outcome.failed.has_value());
        return outcome.refusal.refusal();
    };
    EXPECT_EQ(refusal_of(session.generate_request(prompt, 5)), v1::REFUSAL_UNKNOWN_SESSION);
    session.open();
    EXPECT_EQ(refusal_of(session.generate_request("", 5)), v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(refusal_of(session.generate_request(std::string(2048, 'x'), 5)), v1::REFUSAL_TOO_LONG);
    EXPECT_EQ(refusal_of(session.generate_request(prompt, 5), 1), v1::REFUSAL_BAD_REQUEST) << "not the head";
    auto request = session.generate_request(prompt, 5);
    request.add_tokens(258);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_BAD_REQUEST);
    request = session.generate_request(prompt, 5);
    request.set_chunk_tokens(513);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_BAD_REQUEST);
    request = session.generate_request(prompt, 5);
    request.mutable_sampling()->set_temperature(-1);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_BAD_REQUEST);
    request = session.generate_request(prompt, 5);
    request.set_replayed_tokens(static_cast<uint32_t>(prompt.size()) + 1);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_BAD_REQUEST);
    request = session.generate_request(prompt, 5);
    request.mutable_resume_at()->Add(0);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_BAD_REQUEST) << "two hops";
    request.mutable_resume_at()->Add(3);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_BAD_REQUEST) << "inside the first chunk";
    request = session.generate_request(prompt, 5);
    request.set_cached_tokens(1);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_PREFIX_MISMATCH);
    request = session.generate_request(prompt, 5);
    request.mutable_ticket()->set_epoch(2);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_STALE_EPOCH);
    ASSERT_TRUE(session.generate(prompt, 5).finished.has_value()) << "none of it did harm";
    request = session.generate_request(prompt, 5);
    request.set_cached_tokens(3);
    request.set_prefix_hash(1);
    EXPECT_EQ(refusal_of(request), v1::REFUSAL_PREFIX_MISMATCH);
}

TEST(Refusals, OneGenerationPerSession) {
    auto hops = make_hops("test:6", {0, 6});
    hops[0]->control().hold();
    TestSession session(addresses(hops));
    session.open();
    std::thread first([&] { EXPECT_TRUE(session.generate(prompt, 5).finished.has_value()); });
    ASSERT_TRUE(hops[0]->control().wait_held());
    EXPECT_EQ(session.generate(prompt, 5).refusal.refusal(), v1::REFUSAL_BAD_REQUEST);
    hops[0]->control().release();
    first.join();
}

// ------------------------------------------------------------------------------------------------------- epochs

TEST(Epochs, ReopeningKeepsTheCache) {
    auto hops = make_hops("test:6", {0, 3, 6});
    TestSession session(addresses(hops));
    session.epoch = 5;
    session.open();
    auto request = session.generate_request(prompt, 10);
    request.set_ignore_eog(true);
    const auto first = session.client(0).generate(request);
    const std::string cached = (prompt + first.text()).substr(0, prompt.size() + 9);
    PrefixHistory prefix;
    for (const char c : cached) {
        prefix.append({static_cast<unsigned char>(c)});
    }
    for (const uint64_t stale : {uint64_t{5}, uint64_t{4}}) {
        TestSession old = session;
        old.epoch = stale;
        EXPECT_EQ(open_refusal(old.client(0), old.open_request(0), grpc::StatusCode::FAILED_PRECONDITION).refusal(),
                  v1::REFUSAL_STALE_EPOCH);
    }
    session.epoch = 6;
    for (const auto & response : session.open()) {
        EXPECT_EQ(response.cached_tokens(), cached.size());
        EXPECT_EQ(response.prefix_hash(), prefix.hash());
    }
    auto more = session.generate_request(" more", 10);
    more.set_cached_tokens(prefix.length());
    more.set_prefix_hash(prefix.hash());
    more.set_ignore_eog(true);
    EXPECT_EQ(session.client(0).generate(more).ids(), direct_tokens("test:6", cached + " more", 10, {}, true));
    const auto stats = session.close();
    EXPECT_EQ(stats[1].stats().prefill_tokens(), 5U) << "only the new tokens were computed, and counted from Open on";

    TestSession fresh(addresses(hops));
    EXPECT_EQ(fresh.open()[0].cached_tokens(), 0U);
}

TEST(Epochs, AnOldTicketCannotCloseANewerEpoch) {
    auto hops = make_hops("test:6", {0, 6});
    TestSession session(addresses(hops));
    session.open();
    const auto old_ticket = session.ticket();
    session.epoch = 2;
    session.open();
    v1::CloseResponse response;
    v1::RefusalDetail refusal;
    EXPECT_FALSE(session.client(0).close(old_ticket, response, refusal).ok());
    EXPECT_EQ(refusal.refusal(), v1::REFUSAL_STALE_EPOCH);
    EXPECT_TRUE(session.close()[0].known());
}

TEST(Epochs, ReopeningEndsTheOldGenerationAndWaitsForItsStep) {
    auto hops = make_hops("test:6", {0, 6});
    hops[0]->control().hold();
    TestSession session(addresses(hops));
    session.open();
    Outcome outcome;
    TestSession old = session;
    std::thread caller([&] { outcome = old.generate(prompt, 5); });
    ASSERT_TRUE(hops[0]->control().wait_held());
    session.epoch = 2;
    std::vector<v1::OpenResponse> responses;
    std::thread opener([&] { responses = session.open(); });
    caller.join();  // at once, though its step is still held
    ASSERT_TRUE(outcome.failed.has_value());
    EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_STALE_EPOCH);
    hops[0]->control().release();
    opener.join();
    EXPECT_EQ(responses[0].cached_tokens(), prompt.size()) << "the step that was computed counts";
    EXPECT_EQ(session.generate(prompt, 5).ids(), direct_tokens("test:6", prompt, 5));
}

// ----------------------------------------------------------------------------------------------------- timeouts

TEST(Timeouts, AnIdleSessionIsClosed) {
    WorkerOptions options;
    options.orphan_timeout_ms = 1'000'000;
    auto hops = make_hops("test:6", {0, 6}, options);
    TestSession session(addresses(hops));
    session.open();
    hops[0]->worker().tick(now_us() + 119'000'000);
    EXPECT_EQ(hops[0]->worker().status().open_sessions(), 1U);
    hops[0]->worker().tick(now_us() + 121'000'000);
    EXPECT_EQ(hops[0]->worker().status().open_sessions(), 0U);
    EXPECT_EQ(session.generate(prompt, 1).refusal.refusal(), v1::REFUSAL_UNKNOWN_SESSION);

    TestSession brief(addresses(hops));
    auto request = brief.open_request(0);
    request.set_idle_timeout_s(3);
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(brief.client(0).open(request, response, refusal).ok());
    hops[0]->worker().tick(now_us() + 4'000'000);
    EXPECT_EQ(hops[0]->worker().status().open_sessions(), 0U);
}

TEST(Timeouts, ASessionThatComputesIsNotIdle) {
    auto hops = make_hops("test:6", {0, 6});
    hops[0]->control().hold();
    TestSession session(addresses(hops));
    session.open();
    std::thread caller([&] { EXPECT_EQ(session.generate(prompt, 5).ids(), direct_tokens("test:6", prompt, 5)); });
    ASSERT_TRUE(hops[0]->control().wait_held());
    hops[0]->worker().tick(now_us() + 500'000'000);
    EXPECT_EQ(hops[0]->worker().status().open_sessions(), 1U);
    hops[0]->control().release();
    caller.join();
}

TEST(Timeouts, AHopThatDoesNotAnswerIsNamed) {
    auto hops = make_hops("test:6", {0, 2, 4, 6});
    TestSession other(addresses(hops));
    other.open();
    ASSERT_TRUE(other.generate(prompt, 5).finished.has_value());  // so that all links stand
    TestSession session(addresses(hops));
    session.open();
    hops[2]->control().hold();
    Outcome outcome;
    std::thread caller([&] {
        auto request = session.generate_request(prompt, 5);
        request.set_step_timeout_ms(5000);
        outcome = session.client(0).generate(request);
    });
    ASSERT_TRUE(hops[2]->control().wait_held());
    hops[0]->worker().tick(now_us() + 4'000'000);
    hops[1]->worker().tick(now_us() + 4'000'000);
    EXPECT_EQ(hops[1]->client().status().open_sessions(), 2U);
    hops[1]->worker().tick(now_us() + 5'500'000);  // the hop before the stuck one notices, at the head's own timeout
    caller.join();
    ASSERT_TRUE(outcome.failed.has_value());
    EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_PEER_LOST);
    EXPECT_EQ(outcome.failed->hop_index(), 2U);
    EXPECT_EQ(outcome.failed->shard_id(), "shard-4-6");
    hops[2]->control().release();
}

TEST(Timeouts, TheHeadNoticesThatNoTokenComes) {
    std::vector<std::unique_ptr<Hop>> hops;
    hops.push_back(std::make_unique<Hop>("test:6", LayerRange{0, 3}));
    FakeNeighbour tail;
    auto route = addresses(hops);
    auto description = make_hops("test:6", {3, 6})[0]->address().description;
    route.push_back({tail.address(), description});
    TestSession session(route);
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    ASSERT_TRUE(session.client(0).open(session.open_request(0), response, refusal).ok());
    Outcome outcome;
    std::promise<void> credited;
    std::thread caller([&] {
        outcome = session.client(0).generate(session.generate_request(prompt, 5), [&](const v1::GenerateEvent & event) {
            if (event.has_prefill()) {
                credited.set_value();
            }
        });
    });
    ASSERT_TRUE(tail.next_frame().has_value());
    credited.get_future().wait();  // the frame, but it is never answered
    hops[0]->worker().tick(now_us() + 30'500'000);
    hops[0]->worker().tick(now_us() + 32'000'000);
    caller.join();
    ASSERT_TRUE(outcome.failed.has_value());
    EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_PEER_LOST);
    EXPECT_EQ(outcome.failed->hop_index(), 1U);
    EXPECT_EQ(outcome.failed->shard_id(), "shard-3-6");
}

}  // namespace
}  // namespace meshnet::test
