// The worker's parts that need no network: prefix hash, tickets, scheduling, the head's loop, frame rules, flags.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/worker_support.h"
#include "worker/convert.h"
#include "worker/flags.h"

namespace meshnet {
namespace {

// ------------------------------------------------------------------------------------------------------ prefix

TEST(PrefixHistory, HashesAsTheWireSays) {
    // Reference values, computed from the definition in shard.proto.
    PrefixHistory history;
    EXPECT_EQ(history.hash(), 0x6d6573686e657431ULL);
    history.append({0, 1, 257});
    EXPECT_EQ(history.hash_at(1), 0x176db5dbbbbaa72cULL);
    EXPECT_EQ(history.hash_at(2), 0xa0656558808df254ULL);
    EXPECT_EQ(history.hash(), 0xfcf5468964471a98ULL);
}

TEST(PrefixHistory, TruncatesToAnEarlierHash) {
    PrefixHistory history;
    history.append({5, 6, 7, 8});
    const uint64_t at_two = history.hash_at(2);
    history.truncate(2);
    EXPECT_EQ(history.hash(), at_two);
    EXPECT_EQ(history.tokens(), (std::vector<int32_t>{5, 6}));
    history.append({7, 9});
    PrefixHistory other;
    other.append({5, 6, 7, 8});
    EXPECT_NE(history.hash(), other.hash());
    EXPECT_EQ(history.hash_at(3), other.hash_at(3));
}

// ------------------------------------------------------------------------------------------------------ ticket

v1::Ticket ticket() {
    v1::Ticket ticket;
    ticket.set_session_id(std::string("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f", 16));
    ticket.set_epoch(3);
    ticket.set_expires_unix_s(2'000'000'000);
    // HMAC-SHA256(00..1f, "meshnet-ticket-v1\n000102…0f\n3\nshard-a\n2000000000"), from another implementation.
    std::string mac;
    EXPECT_TRUE(TicketVerifier::parse_key("775ac9f63deeac588e9b64b16b64fdf3559aa22ef55a3683a9f2eda12aa2c5ab", mac));
    ticket.set_mac(mac);
    return ticket;
}

std::string key() {
    std::string key;
    EXPECT_TRUE(TicketVerifier::parse_key("000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F", key));
    return key;
}

TEST(Ticket, AcceptsOnlyTheExactTicketInTime) {
    const TicketVerifier verifier(key(), "shard-a");
    EXPECT_FALSE(verifier.check(ticket(), 1'999'999'999).refused());
    EXPECT_EQ(verifier.check(ticket(), 2'000'000'001).code, v1::REFUSAL_BAD_TICKET);
    EXPECT_FALSE(verifier.check_authentic(ticket()).refused());
    auto forged = ticket();
    forged.set_epoch(4);
    EXPECT_EQ(verifier.check(forged, 0).code, v1::REFUSAL_BAD_TICKET);
    forged = ticket();
    forged.set_expires_unix_s(2'000'000'001);
    EXPECT_EQ(verifier.check(forged, 0).code, v1::REFUSAL_BAD_TICKET);
    forged = ticket();
    forged.mutable_session_id()->at(15) = 'x';
    EXPECT_EQ(verifier.check(forged, 0).code, v1::REFUSAL_BAD_TICKET);
    forged = ticket();
    forged.clear_mac();
    EXPECT_EQ(verifier.check(forged, 0).code, v1::REFUSAL_BAD_TICKET);
    forged = ticket();
    forged.set_session_id("short");
    EXPECT_EQ(verifier.check(forged, 0).code, v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(TicketVerifier(key(), "shard-b").check(ticket(), 0).code, v1::REFUSAL_BAD_TICKET);
}

TEST(Ticket, WithoutAKeyAnyWellFormedTicketWill) {
    const TicketVerifier verifier("", "shard-a");
    v1::Ticket bare;
    bare.set_session_id(std::string(16, 'x'));
    EXPECT_FALSE(verifier.check(bare, 5'000'000'000).refused());
    bare.set_session_id("x");
    EXPECT_TRUE(verifier.check(bare, 0).refused());
}

TEST(Ticket, KeysAreHex) {
    std::string parsed;
    EXPECT_FALSE(TicketVerifier::parse_key("0", parsed));
    EXPECT_FALSE(TicketVerifier::parse_key("0g", parsed));
    ASSERT_TRUE(TicketVerifier::parse_key("fF00", parsed));
    EXPECT_EQ(parsed, std::string("\xff\x00", 2));
}

// --------------------------------------------------------------------------------------------------- scheduler

// Runs `n` choices over sessions that are always ready; returns whom they served.
std::vector<size_t> serve(Scheduler & scheduler, std::vector<ReadyStep> sessions, size_t n) {
    std::vector<size_t> order;
    for (size_t i = 0; i < n; ++i) {
        for (const size_t index : scheduler.choose(sessions)) {
            order.push_back(index);
            sessions[index].last_served = scheduler.served();
        }
    }
    return order;
}

TEST(Scheduler, DecodeSessionsTakeTurns) {
    Scheduler scheduler;
    EXPECT_EQ(serve(scheduler, {{false, 0}, {false, 0}, {false, 0}}, 6), (std::vector<size_t>{0, 1, 2, 0, 1, 2}));
}

TEST(Scheduler, ARoundIsEveryDecodeStepThenOnePrefillChunk) {
    Scheduler scheduler;
    EXPECT_EQ(serve(scheduler, {{true, 0}, {false, 0}, {true, 0}, {false, 0}}, 9),
              (std::vector<size_t>{1, 3, 0, 1, 3, 2, 1, 3, 0}));
}

TEST(Scheduler, PrefillSessionsTakeTurns) {
    Scheduler scheduler;
    EXPECT_EQ(serve(scheduler, {{true, 0}, {true, 0}}, 4), (std::vector<size_t>{0, 1, 0, 1}));
    EXPECT_TRUE(scheduler.choose({}).empty());
}

// -------------------------------------------------------------------------------------------------- generation

struct RecordingSink final : EventSink {
    std::vector<v1::GenerateEvent> events;
    bool last_seen = false;

    void push(v1::GenerateEvent event, bool last) override {
        EXPECT_FALSE(last_seen);
        last_seen = last;
        events.push_back(std::move(event));
    }
    void flush() override {}
    bool has_room() const override {
        return true;
    }
};

v1::GenerateRequest request_of(uint32_t n_prompt, uint32_t chunk, uint32_t max_new) {
    v1::GenerateRequest request;
    for (uint32_t i = 0; i < n_prompt; ++i) {
        request.add_tokens(i);
    }
    request.set_chunk_tokens(chunk);
    request.set_max_new_tokens(max_new);
    return request;
}

v1::SampledFrame sampled(uint32_t position, uint32_t token) {
    v1::SampledFrame frame;
    frame.add_tokens()->set_position(position);
    frame.mutable_tokens(0)->set_token(token);
    return frame;
}

TEST(Generation, ChunksThePromptThenFeedsTokensBack) {
    auto sink = std::make_shared<RecordingSink>();
    auto request = request_of(5, 2, 2);
    request.set_cached_tokens(10);
    request.set_step_timeout_ms(77);
    request.mutable_sampling()->set_seed(4);
    Generation generation(request, 100, sink, 1000);
    std::string problem;

    auto frame = generation.next_step();
    EXPECT_EQ(frame.position(), 10U);
    EXPECT_EQ(frame.tokens_size(), 2);
    EXPECT_TRUE(frame.prefill() && frame.rollback() && frame.has_sampling());
    EXPECT_EQ(frame.step_timeout_ms(), 77U);
    EXPECT_EQ(frame.sample_at_size(), 0);
    frame = generation.next_step();
    EXPECT_EQ(frame.position(), 12U);
    EXPECT_FALSE(frame.rollback() || frame.has_sampling());
    EXPECT_FALSE(generation.awaits_sample());
    frame = generation.next_step();
    EXPECT_EQ(frame.position(), 14U);
    ASSERT_EQ(frame.sample_at_size(), 1);
    EXPECT_EQ(frame.sample_at(0), 0U);
    EXPECT_TRUE(generation.awaits_sample());
    EXPECT_FALSE(generation.has_step());

    EXPECT_FALSE(generation.on_sampled(sampled(14, 7), false, 2000, problem));
    EXPECT_FALSE(generation.on_sampled({}, false, 2000, problem));
    ASSERT_TRUE(generation.on_sampled(sampled(15, 7), false, 2500, problem)) << problem;
    EXPECT_FALSE(generation.on_sampled(sampled(16, 7), false, 2000, problem)) << "nobody asked for it";
    frame = generation.next_step();
    EXPECT_EQ(frame.position(), 15U);
    EXPECT_EQ(frame.tokens(0), 7U);
    EXPECT_FALSE(frame.prefill());
    ASSERT_TRUE(generation.on_sampled(sampled(16, 8), false, 3000, problem));
    EXPECT_TRUE(generation.finished());
    const auto & finished = sink->events.back().finished();
    EXPECT_EQ(finished.cause(), v1::FINISH_LENGTH);
    EXPECT_EQ(finished.generated_tokens(), 2U);
    EXPECT_EQ(finished.prefill_us(), 1500U);
    EXPECT_EQ(finished.decode_us(), 500U);
}

TEST(Generation, ChunksAreCountedFromPositionZero) {
    auto sink = std::make_shared<RecordingSink>();
    auto request = request_of(9, 4, 1);
    request.set_cached_tokens(6);
    Generation generation(request, 100, sink, 0);
    std::vector<std::pair<uint32_t, int>> steps;
    while (generation.has_step()) {
        const auto frame = generation.next_step();
        steps.emplace_back(frame.position(), frame.tokens_size());
    }
    EXPECT_EQ(steps, (std::vector<std::pair<uint32_t, int>>{{6, 2}, {8, 4}, {12, 3}}));
}

TEST(Generation, ReplaysOneTokenPerStepWithoutWaiting) {
    auto sink = std::make_shared<RecordingSink>();
    auto request = request_of(9, 4, 1);
    request.set_replayed_tokens(3);
    request.mutable_resume_at()->Add(0);
    request.mutable_resume_at()->Add(7);
    Generation generation(request, 100, sink, 0);
    std::vector<std::pair<uint32_t, int>> steps;
    for (bool first = true; generation.has_step(); first = false) {
        EXPECT_TRUE(generation.next_is_prefill());
        const auto frame = generation.next_step();
        steps.emplace_back(frame.position(), frame.tokens_size());
        EXPECT_TRUE(frame.prefill());
        EXPECT_EQ(frame.has_sampling(), first);
        EXPECT_EQ(frame.rollback(), first);
        EXPECT_EQ(frame.resume_at_size(), first ? 2 : 0);
        EXPECT_EQ(frame.sample_at_size(), generation.has_step() ? 0 : 1);
        EXPECT_EQ(generation.awaits_sample(), !generation.has_step());
        generation.on_prefill_done(static_cast<uint32_t>(frame.tokens_size()));
    }
    EXPECT_EQ(steps, (std::vector<std::pair<uint32_t, int>>{{0, 4}, {4, 2}, {6, 1}, {7, 1}, {8, 1}}));
    EXPECT_EQ(sink->events.back().prefill().done_tokens(), 9U);
    EXPECT_EQ(sink->events.back().prefill().total_tokens(), 9U);
    std::string problem;
    EXPECT_TRUE(generation.on_sampled(sampled(9, 7), false, 0, problem)) << problem;
}

TEST(Generation, NothingButReplayedTokens) {
    auto sink = std::make_shared<RecordingSink>();
    auto request = request_of(2, 4, 1);
    request.set_cached_tokens(5);
    request.set_replayed_tokens(2);
    Generation generation(request, 100, sink, 0);
    EXPECT_EQ(generation.next_step().tokens_size(), 1);
    EXPECT_EQ(generation.next_step().position(), 6U);
    EXPECT_FALSE(generation.has_step());
}

TEST(Generation, AChunkIsCutAtTheLastTokenOnlyIfAHopResumesThere) {
    const auto steps_of = [](const std::vector<uint32_t> & resume_at) {
        auto request = request_of(7, 4, 1);
        request.mutable_resume_at()->Add(resume_at.begin(), resume_at.end());
        Generation generation(request, 100, std::make_shared<RecordingSink>(), 0);
        std::vector<int> steps;
        while (generation.has_step()) {
            steps.push_back(generation.next_step().tokens_size());
        }
        return steps;
    };
    EXPECT_EQ(steps_of({}), (std::vector<int>{4, 3}));
    EXPECT_EQ(steps_of({0, 4}), (std::vector<int>{4, 3}));
    EXPECT_EQ(steps_of({0, 4, 6}), (std::vector<int>{4, 2, 1}));
}

v1::FinishCause cause_of(v1::GenerateRequest request, uint32_t capacity, bool is_eog) {
    auto sink = std::make_shared<RecordingSink>();
    Generation generation(request, capacity, sink, 0);
    std::string problem;
    for (uint32_t position = static_cast<uint32_t>(request.tokens_size()); !generation.finished() && position < 20;
         ++position) {
        while (generation.has_step()) {
            generation.next_step();
        }
        EXPECT_TRUE(generation.on_sampled(sampled(position, 9), is_eog, 0, problem)) << problem;
    }
    return generation.finished() ? sink->events.back().finished().cause() : v1::FINISH_UNSPECIFIED;
}

TEST(Generation, EveryFinishCause) {
    EXPECT_EQ(cause_of(request_of(3, 8, 4), 100, false), v1::FINISH_LENGTH);
    EXPECT_EQ(cause_of(request_of(3, 8, 4), 100, true), v1::FINISH_EOG);
    EXPECT_EQ(cause_of(request_of(3, 8, 0), 5, false), v1::FINISH_CAPACITY);
    auto request = request_of(3, 8, 4);
    request.set_ignore_eog(true);
    EXPECT_EQ(cause_of(request, 100, true), v1::FINISH_LENGTH);
    request.add_stop_tokens(9);
    EXPECT_EQ(cause_of(request, 100, true), v1::FINISH_STOP_TOKEN);
}

TEST(Generation, PrefillProgressReachesTheTotalBeforeTheFirstToken) {
    auto sink = std::make_shared<RecordingSink>();
    Generation generation(request_of(4, 2, 1), 100, sink, 0);
    std::string problem;
    generation.next_step();
    generation.on_prefill_done(2);
    generation.next_step();
    ASSERT_TRUE(generation.on_sampled(sampled(4, 1), false, 0, problem));
    generation.on_prefill_done(2);
    ASSERT_EQ(sink->events.size(), 4U);
    EXPECT_EQ(sink->events[0].prefill().done_tokens(), 2U);
    EXPECT_EQ(sink->events[1].prefill().done_tokens(), 4U);
    EXPECT_TRUE(sink->events[2].has_token());
    EXPECT_TRUE(sink->events[3].has_finished());
}

// ------------------------------------------------------------------------------------------------- frame rules

class FrameRulesTest : public testing::Test {
  protected:
    std::unique_ptr<ShardEngine> engine = test::make_engine("test:4", {2, 4}, 2048, 1, 8);
    FrameRules rules{engine->describe()};

    v1::StepFrame good() const {
        return test::step_frame(std::string(16, 'x'), 1, 0, {}, {1, 2, 3}).step();
    }
};

TEST_F(FrameRulesTest, AcceptsAGoodStep) {
    auto frame = good();
    frame.add_sample_at(0);
    frame.add_sample_at(2);
    EXPECT_FALSE(rules.check_step(frame).refused()) << rules.check_step(frame).message;
}

TEST_F(FrameRulesTest, RefusesEveryMalformation) {
    const std::vector<std::pair<const char *, std::function<void(v1::StepFrame &)>>> malformations = {
        {"no tokens", [](auto & f) { f.clear_tokens(); }},
        {"too many tokens", [](auto & f) { f.mutable_tokens()->Resize(9, 1); }},
        {"token out of range", [](auto & f) { f.set_tokens(1, 258); }},
        {"huge token", [](auto & f) { f.set_tokens(1, 0xffffffff); }},
        {"huge position", [](auto & f) { f.set_position(0xffffffff); }},
        {"position beyond any session", [](auto & f) { f.set_position(max_session_tokens - 2); }},
        {"sample index out of range", [](auto & f) { f.add_sample_at(3); }},
        {"sample index twice", [](auto & f) { f.add_sample_at(1), f.add_sample_at(1); }},
        {"no boundary", [](auto & f) { f.clear_boundary(); }},
        {"two tensors", [](auto & f) { *f.add_boundary() = f.boundary(0); }},
        {"other name", [](auto & f) { f.mutable_boundary(0)->set_name("x"); }},
        {"other type", [](auto & f) { f.mutable_boundary(0)->set_dtype(v1::DTYPE_I32); }},
        {"unknown type", [](auto & f) { f.mutable_boundary(0)->set_dtype(static_cast<v1::DType>(99)); }},
        {"other shape", [](auto & f) { f.mutable_boundary(0)->set_shape(0, 8); }},
        {"more dimensions", [](auto & f) { f.mutable_boundary(0)->add_shape(1); }},
        {"too few bytes", [](auto & f) { f.mutable_boundary(0)->mutable_data()->pop_back(); }},
        {"too many bytes", [](auto & f) { f.mutable_boundary(0)->mutable_data()->push_back('x'); }},
        {"bad sampling", [](auto & f) { f.mutable_sampling()->set_top_p(2); }},
    };
    for (const auto & [name, malform] : malformations) {
        auto frame = good();
        malform(frame);
        EXPECT_EQ(rules.check_step(frame).code, v1::REFUSAL_BAD_REQUEST) << name;
    }
}

TEST_F(FrameRulesTest, RefusesSamplingOutOfRange) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float inf = std::numeric_limits<float>::infinity();
    const std::vector<std::function<void(v1::SamplingParams &)>> malformations = {
        [&](auto & p) { p.set_temperature(-1); },
        [&](auto & p) { p.set_temperature(nan); },
        [&](auto & p) { p.set_temperature(inf); },
        [&](auto & p) { p.set_top_p(nan); },
        [&](auto & p) { p.set_top_p(-0.1f); },
        [&](auto & p) { p.set_min_p(1.5f); },
        [&](auto & p) { p.set_typical_p(nan); },
        [&](auto & p) { p.set_penalty_last_n(-2); },
        [&](auto & p) { p.set_repeat_penalty(-1); },
        [&](auto & p) { p.set_repeat_penalty(1e-9f); },
        [&](auto & p) { p.set_repeat_penalty(nan); },
        [&](auto & p) { p.set_frequency_penalty(inf); },
        [&](auto & p) { p.set_presence_penalty(nan); },
        [&](auto & p) { p.set_logprobs(22); },
        [&](auto & p) { (*p.mutable_logit_bias())[258] = 1; },
        [&](auto & p) { (*p.mutable_logit_bias())[1] = nan; },
        // As a newer peer might send it: too much to travel on.
        [&](auto & p) {
            p.GetReflection()->MutableUnknownFields(&p)->AddLengthDelimited(1000, std::string(300'000, 'x'));
        },
    };
    v1::SamplingParams plain;
    EXPECT_FALSE(rules.check_sampling(plain).refused());
    for (size_t i = 0; i < malformations.size(); ++i) {
        v1::SamplingParams params;
        malformations[i](params);
        EXPECT_EQ(rules.check_sampling(params).code, v1::REFUSAL_BAD_REQUEST) << i;
    }
}

TEST_F(FrameRulesTest, ResumePositionsBeginSteps) {
    v1::GenerateRequest good;
    for (uint32_t i = 0; i < 20; ++i) {
        good.add_tokens(i);
    }
    good.set_cached_tokens(5);
    good.set_chunk_tokens(8);
    good.set_replayed_tokens(6);  // steps at 5, 8, 16, and 19 to 24
    EXPECT_FALSE(FrameRules::check_resume(good, 3).refused()) << "empty: all hops from cached_tokens";
    const auto code = [&](const std::vector<uint32_t> & resume_at, uint32_t n_hops) {
        auto request = good;
        request.mutable_resume_at()->Add(resume_at.begin(), resume_at.end());
        return FrameRules::check_resume(request, n_hops).code;
    };
    for (const std::vector<uint32_t> & right :
         std::vector<std::vector<uint32_t>>{{5, 5, 5}, {5, 8, 16}, {5, 19, 19}, {5, 20, 23}, {5, 24, 24}, {5, 5, 24}}) {
        EXPECT_EQ(code(right, 3), v1::REFUSAL_UNSPECIFIED) << testing::PrintToString(right);
    }
    for (const std::vector<uint32_t> & wrong : std::vector<std::vector<uint32_t>>{
             {5, 5}, {5, 5, 5, 5}, {4, 5, 5}, {6, 6, 6}, {5, 8, 5}, {5, 7, 8}, {5, 15, 16}, {5, 18, 19}, {5, 5, 25}}) {
        EXPECT_EQ(code(wrong, 3), v1::REFUSAL_BAD_REQUEST) << testing::PrintToString(wrong);
    }
    good.set_replayed_tokens(20);
    EXPECT_FALSE(rules.check_tokens(good).refused());
    good.set_replayed_tokens(21);
    const auto refusal = rules.check_tokens(good);
    EXPECT_EQ(refusal.code, v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(refusal.requested, 21U);
    EXPECT_EQ(refusal.limit, 20U);
}

TEST_F(FrameRulesTest, AFrameBeginsWhereItsHopResumes) {
    auto frame = good();
    frame.set_position(8);
    frame.mutable_resume_at()->Add(0);
    frame.mutable_resume_at()->Add(8);
    frame.mutable_resume_at()->Add(9);
    EXPECT_FALSE(rules.check_step(frame).refused());
    EXPECT_FALSE(FrameRules::check_resume(frame, 1, 3).refused());
    EXPECT_EQ(FrameRules::check_resume(frame, 0, 3).code, v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(FrameRules::check_resume(frame, 2, 3).code, v1::REFUSAL_BAD_REQUEST);
    EXPECT_EQ(FrameRules::check_resume(frame, 1, 4).code, v1::REFUSAL_BAD_REQUEST);
    frame.set_resume_at(2, 7);
    EXPECT_EQ(FrameRules::check_resume(frame, 1, 3).code, v1::REFUSAL_BAD_REQUEST);
    frame.clear_sampling();
    EXPECT_EQ(rules.check_step(frame).code, v1::REFUSAL_BAD_REQUEST) << "not the first frame";
}

TEST(FrameRules, AStepAlwaysFitsAMessage) {
    EngineDescription description;
    description.step_tokens = 65536;
    description.boundary_in.tensors = {{"h", DType::f32, {16384}}};
    const FrameRules rules(description);
    EXPECT_GT(rules.max_step_tokens(), 900U);
    EXPECT_LT(uint64_t{rules.max_step_tokens()} * 65536, max_message_bytes);
}

// ----------------------------------------------------------------------------------------------------- addresses

TEST(Address, IsHostAndPortOnly) {
    for (const char * good : {"127.0.0.1:80", "node-1.example:65535", "[::1]:5", "a_b:1"}) {
        EXPECT_TRUE(is_address(good)) << good;
    }
    for (const char * bad : {"", ":80", "host", "host:", "host:123456", "host:8a", "unix:/tmp/x", "unix:///x:1",
                             "dns:///a:1", "a/b:1", "[::1]", "[]:1", "[::1:1", "a b:1"}) {
        EXPECT_FALSE(is_address(bad)) << bad;
    }
}

// --------------------------------------------------------------------------------------------------------- flags

std::string parse(std::vector<std::string> arguments, Flags & flags) {
    arguments.insert(arguments.begin(), "meshnet-shard");
    std::vector<char *> argv;
    for (auto & argument : arguments) {
        argv.push_back(argument.data());
    }
    std::string problem;
    const bool ok = parse_flags(static_cast<int>(argv.size()), argv.data(), flags, problem);
    EXPECT_EQ(ok, problem.empty());
    return problem;
}

TEST(Flags, AreRead) {
    Flags flags;
    EXPECT_EQ(parse({"--model",
                     "m.gguf",
                     "--layers=2:7",
                     "--listen",
                     "0.0.0.0:5",
                     "--engine",
                     "test",
                     "--threads",
                     "3",
                     "--context",
                     "100",
                     "--sessions",
                     "7",
                     "--step-tokens",
                     "64",
                     "--chunk-tokens",
                     "32",
                     "--orphan-timeout-ms",
                     "700",
                     "--kv-type-k",
                     "q8_0",
                     "--artifact-digest",
                     "sha256:x",
                     "--shard-id",
                     "s",
                     "--exit-with-parent"},
                    flags),
              "");
    EXPECT_EQ(flags.engine.layers, (LayerRange{2, 7}));
    EXPECT_EQ(flags.engine.threads, 3);
    EXPECT_EQ(flags.engine.session_tokens, 100U);
    EXPECT_EQ(flags.engine.sequences, 7U);
    EXPECT_EQ(flags.engine.step_tokens, 64U);
    EXPECT_EQ(flags.engine.kv_type_k, "q8_0");
    EXPECT_EQ(flags.worker.chunk_tokens, 32U);
    EXPECT_EQ(flags.worker.orphan_timeout_ms, 700);
    EXPECT_EQ(flags.worker.shard_id, "s");
    EXPECT_TRUE(flags.exit_with_parent);
    EXPECT_FALSE(flags.describe);
    Flags all;
    EXPECT_EQ(parse({"--model", "m", "--layers", "all"}, all), "");
    EXPECT_EQ(all.engine.layers, (LayerRange{0, 0}));
}

TEST(Flags, BadOnesAreNamed) {
    for (const std::vector<std::string> & bad : std::vector<std::vector<std::string>>{{"--frob"},
                                                                                      {"--layers", "3:3"},
                                                                                      {"--layers", "a:b"},
                                                                                      {"--layers", "5"},
                                                                                      {"--threads", "-1"},
                                                                                      {"--engine", "cuda"},
                                                                                      {"--context", "0"},
                                                                                      {"--context", "999999"},
                                                                                      {"--sessions", ""},
                                                                                      {"--threads"}}) {
        Flags flags;
        const auto problem = parse(bad, flags);
        EXPECT_NE(problem.find(bad[0]), std::string::npos) << problem;
    }
    Flags flags;
    EXPECT_NE(parse({}, flags).find("--model"), std::string::npos);
}

}  // namespace
}  // namespace meshnet
