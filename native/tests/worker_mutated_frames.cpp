// Workers in every role of a route, and frames that were good until some of their bytes changed.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <future>
#include <iostream>
#include <random>

#include "tests/worker_support.h"
#include "worker/clock.h"

namespace meshnet::test {
namespace {

// Counts credits; every frame is owed exactly one.
class CreditCounter final : public CreditSink {
  public:
    uint64_t id() const override {
        return ~uint64_t{0};  // streams count from 1
    }
    void give(uint64_t, int64_t, v1::Refusal, bool) override {
        ++given;
    }
    void expect() override {}
    void flush() override {}

    std::atomic<uint64_t> given = 0;
};

class TokenCounter final : public EventSink {
  public:
    void push(v1::GenerateEvent event, bool) override {
        tokens += event.has_token() ? 1 : 0;
    }
    void flush() override {}
    bool has_room() const override {
        return true;
    }

    std::atomic<uint64_t> tokens = 0;
};

constexpr std::array<const char *, 3> role_names = {"head", "middle", "tail"};
constexpr std::array<const char *, 6> seed_names = {"step",    "sampling step", "resuming step",
                                                    "sampled", "failure",       "end"};

// A worker in one of the three roles, whose neighbours the test plays.
class Target {
  public:
    Target(Hop & hop, uint32_t hop_index)
        : hop_(hop), index_(hop_index), session_(route(hop.address(), neighbour_.address(), hop_index)) {}

    Hop & hop() {
        return hop_;
    }
    uint64_t sent() const {
        return sent_;
    }
    uint64_t credited() const {
        return credits_->given;
    }
    uint64_t tokens() const {
        return tokens_->tokens;
    }
    uint64_t epochs() const {
        return session_.epoch - 1;
    }

    // Opens the session (again), with a good exchange that leads to where the seed frames go on: the head waits for the
    // token at position 3, the others hold three positions.
    testing::AssertionResult begin_epoch() {
        ++session_.epoch;
        const auto opened = std::make_shared<std::promise<Refusal>>();
        auto refusal = opened->get_future();
        hop_.worker().open(session_.open_request(index_),
                           [opened](const Refusal & answer, const v1::OpenResponse &) { opened->set_value(answer); });
        if (refusal.wait_for(std::chrono::milliseconds(deadline_ms)) != std::future_status::ready) {
            return testing::AssertionFailure() << "open was not answered";
        }
        if (const auto answer = refusal.get(); answer.refused()) {
            return testing::AssertionFailure() << "open was refused: " << answer.message;
        }
        if (index_ == 0) {
            const auto answer = hop_.worker().generate(session_.generate_request("abc", 50), tokens_);
            if (answer.refused()) {
                return testing::AssertionFailure() << "generate was refused: " << answer.message;
            }
        } else {
            auto frame = step(0, {}, {1, 2, 3});
            frame.mutable_step()->set_rollback(true);
            if (index_ == 2) {
                frame.mutable_step()->add_sample_at(2);
            }
            hand_over(std::move(frame), 0);
        }
        while (const auto frame = neighbour_.next_frame()) {
            if (frame->session_id() == session_.id() && frame->epoch() == session_.epoch) {
                return (index_ == 2 ? frame->has_sampled() : frame->has_step())
                           ? testing::AssertionSuccess()
                           : testing::AssertionFailure() << "answered a good frame by " << frame->ShortDebugString();
            }
        }
        return testing::AssertionFailure() << "no answer to a good frame";
    }

    // Of the present epoch, in the order of seed_names.
    v1::SeamFrame seed(size_t kind) const {
        v1::SeamFrame frame;
        switch (kind) {
        case 0:
            frame = step(3, {1, 2, 3}, {4, 5, 6});
            frame.mutable_step()->clear_sampling();
            frame.mutable_step()->set_prefill(true);
            break;
        case 1: {
            frame = step(3, {1, 2, 3}, {4, 5});
            auto & sampling = *frame.mutable_step()->mutable_sampling();
            sampling.set_temperature(0.8f);
            sampling.set_top_k(40);
            sampling.set_top_p(0.9f);
            sampling.set_min_p(0.05f);
            sampling.set_typical_p(0.95f);
            sampling.set_penalty_last_n(64);
            sampling.set_repeat_penalty(1.1f);
            sampling.set_frequency_penalty(0.5f);
            sampling.set_presence_penalty(-0.5f);
            sampling.set_seed(7);
            sampling.set_logprobs(6);
            (*sampling.mutable_logit_bias())[65] = 1.5f;
            frame.mutable_step()->add_sample_at(0);
            frame.mutable_step()->add_sample_at(1);
            frame.mutable_step()->set_step_timeout_ms(20'000);
            without_boundary_at_head(frame);
            break;
        }
        case 2:
            frame = step(1, {1}, {2, 3, 4});
            frame.mutable_step()->set_rollback(true);
            for (uint32_t hop = 0; hop < 3; ++hop) {
                frame.mutable_step()->add_resume_at(hop < index_ ? 0 : hop == index_ ? 1 : 2);
            }
            without_boundary_at_head(frame);
            break;
        case 3: {
            auto & token = *frame.mutable_sampled()->add_tokens();
            token.set_position(3);
            token.set_token('x');
            token.set_piece("x");
            token.set_has_logprob(true);
            token.set_logprob(-0.5f);
            for (const char c : {'x', 'y'}) {
                auto & top = *token.add_top();
                top.set_token(static_cast<unsigned char>(c));
                top.set_logprob(-1.0f);
                top.set_piece(std::string(1, c));
            }
            break;
        }
        case 4:
            frame.mutable_failure()->set_refusal(v1::REFUSAL_ENGINE_FAILURE);
            frame.mutable_failure()->set_message("out of memory");
            frame.mutable_failure()->set_hop_index(2);
            frame.mutable_failure()->set_shard_id("shard-4-6");
            break;
        default:
            frame.mutable_end()->set_message("nothing was heard of its gateway");
        }
        frame.set_session_id(session_.id());
        frame.set_epoch(session_.epoch);
        frame.set_frame_no(1);
        return frame;
    }

    bool names_session(const v1::SeamFrame & frame) const {
        return frame.session_id() == session_.id() && frame.epoch() == session_.epoch;
    }

    void hand_over(v1::SeamFrame frame, uint64_t bytes) {
        ++sent_;
        PendingCredit credit(credits_, frame.frame_no(), now_us());
        static_cast<void>(hop_.worker().on_frame(std::move(credit), std::move(frame), bytes));
    }

    void close() {
        v1::CloseResponse response;
        v1::RefusalDetail refusal;
        EXPECT_TRUE(session_.client(index_).close(session_.ticket(), response, refusal).ok());
    }

  private:
    static std::vector<HopAddress> route(const HopAddress & worker, const std::string & neighbour, uint32_t hop_index) {
        std::vector<HopAddress> hops(role_names.size());
        for (size_t i = 0; i < hops.size(); ++i) {
            hops[i].address = neighbour;
            hops[i].description.set_shard_id("fake-" + std::to_string(i));
        }
        hops[hop_index] = worker;
        return hops;
    }

    v1::SeamFrame step(uint32_t position, const std::vector<uint32_t> & prefix,
                       const std::vector<uint32_t> & tokens) const {
        return step_frame(session_.id(), session_.epoch, position, prefix, tokens);
    }

    // Otherwise the head would refuse every step for its boundary.
    void without_boundary_at_head(v1::SeamFrame & frame) const {
        if (index_ == 0) {
            frame.mutable_step()->clear_boundary();
        }
    }

    Hop & hop_;
    const uint32_t index_;
    FakeNeighbour neighbour_;
    TestSession session_;
    std::shared_ptr<CreditCounter> credits_ = std::make_shared<CreditCounter>();
    std::shared_ptr<TokenCounter> tokens_ = std::make_shared<TokenCounter>();
    uint64_t sent_ = 0;
};

class FrameMutator {
  public:
    explicit FrameMutator(uint32_t seed) : random_(seed) {}

    // The bytes of a damaged frame; rarely bytes that never were one.
    std::string mutated(const v1::SeamFrame & seed) {
        if (below(32) == 0) {
            return noise(below(300));
        }
        if (below(4) == 0) {
            return damaged(seed.SerializeAsString());
        }
        // Only the body is damaged, and has its right length: other frames seldom get past the parser and the look-up
        // of the session.
        const auto * field = v1::SeamFrame::descriptor()->FindFieldByNumber(seed.body_case());
        const std::string body = seed.GetReflection()->GetMessage(seed, field).SerializeAsString();
        v1::SeamFrame frame = seed;
        frame.clear_body();
        frame.GetReflection()->MutableUnknownFields(&frame)->AddLengthDelimited(field->number(), damaged(body));
        return frame.SerializeAsString();
    }

  private:
    uint32_t below(uint32_t n) {
        return static_cast<uint32_t>(random_()) % n;
    }

    // The middle of a long frame is boundary data, where one byte is as good as another: half of the places are not
    // there.
    uint32_t place_in(uint32_t size) {
        constexpr uint32_t end = 48;
        if (size <= 2 * end || below(2) == 0) {
            return below(size + 1);
        }
        const uint32_t at = below(2 * end + 1);
        return at < end ? at : size - 2 * end + at;
    }

    std::string noise(size_t size) {
        std::string bytes(size, '\0');
        for (auto & byte : bytes) {
            byte = static_cast<char>(random_());
        }
        return bytes;
    }

    std::string damaged(std::string bytes) {
        // Zero, the ends of the integers, the oddest floats.
        static constexpr std::array<uint32_t, 7> edges = {0,          1,          0x7fffffff, 0x80000000,
                                                          0xffffffff, 0x7f800000, 0x7fc00000};
        for (uint32_t edits = below(2) == 0 ? 1 : 1 + below(4); edits > 0; --edits) {
            const size_t at = place_in(static_cast<uint32_t>(bytes.size()));
            switch (below(8)) {
            case 0:
                bytes.erase(at, 1 + below(8));
                break;
            case 1:
                bytes.insert(at, noise(1 + below(4)));
                break;
            case 2:  // a part twice, which may be a whole field
                bytes.insert(at, bytes.substr(at, 1 + below(40)));
                break;
            case 3: {
                const uint32_t edge = edges[below(edges.size())];
                bytes.replace(at, sizeof(edge), reinterpret_cast<const char *>(&edge), sizeof(edge));
                break;
            }
            case 4:
                if (below(4) == 0) {
                    bytes.resize(at);
                }
                break;
            default:
                if (at < bytes.size()) {
                    bytes[at] = static_cast<char>(below(2) == 0 ? bytes[at] ^ (1 << below(8)) : below(256));
                }
            }
        }
        return bytes;
    }

    std::mt19937 random_;
};

std::string in_hex(const std::vector<std::string> & frames) {
    std::string text;
    for (const auto & frame : frames) {
        text += '\n';
        for (const char byte : frame) {
            constexpr char digits[] = "0123456789abcdef";
            text += digits[static_cast<unsigned char>(byte) >> 4];
            text += digits[static_cast<unsigned char>(byte) & 15];
        }
    }
    return text;
}

class RouteUnderAttack : public testing::Test {
  protected:
    // Mutated frames per epoch. One that is refused breaks the epoch for those behind it. It has no factor in common
    // with the number of kinds, so that every kind is often first.
    static constexpr size_t burst = 7;

    std::vector<std::unique_ptr<Hop>> hops = make_hops("test:6", {0, 2, 4, 6});

    // Protobuf logs every string that is not UTF-8. Here, because setting its handler is not thread-safe.
    static void SetUpTestSuite() {
        log_handler = google::protobuf::SetLogHandler(nullptr);
    }
    static void TearDownTestSuite() {
        google::protobuf::SetLogHandler(log_handler);
    }
    inline static google::protobuf::LogHandler * log_handler = nullptr;

    void expect_nothing_left() {
        for (const auto & hop : hops) {
            const auto status = hop->client().status();
            EXPECT_EQ(status.open_sessions(), 0U);
            EXPECT_EQ(status.kv_tokens(), 0U);
            EXPECT_EQ(status.queued_frames(), 0U);
        }
    }

    // Once the attacked sessions are closed: nothing of them is left, and every slot of every worker serves again.
    void expect_unharmed() {
        expect_nothing_left();
        const auto expected = direct_tokens("test:6", "abc", 10);
        std::deque<TestSession> sessions;
        for (uint32_t slot = 0; slot < hops[0]->client().status().session_slots(); ++slot) {
            auto & session = sessions.emplace_back(addresses(hops));
            session.open();
            const auto outcome = session.generate("abc", 10);
            ASSERT_TRUE(outcome.finished.has_value())
                << "slot " << slot << ": " << (outcome.failed.has_value() ? outcome.failed->message() : "no end");
            EXPECT_EQ(outcome.ids(), expected);
        }
        for (auto & session : sessions) {
            session.close();
        }
        expect_nothing_left();
    }
};

TEST_F(RouteUnderAttack, SurvivesMutatedFrames) {
    constexpr size_t epochs_per_role = 5'000;
    constexpr uint64_t least_in_all = 100'000;
    constexpr uint64_t least_of_a_kind = 5'500;
    constexpr uint64_t least_to_the_session = 4'500;  // of a kind: with its session and epoch intact
    FrameMutator mutator(20240711);
    uint64_t in_all = 0;
    for (uint32_t role = 0; role < role_names.size(); ++role) {
        SCOPED_TRACE(role_names[role]);
        Target target(*hops[role], role);
        std::array<uint64_t, seed_names.size()> taken{};
        std::array<uint64_t, seed_names.size()> to_the_session{};
        size_t kind = 0;
        std::vector<std::string> last;
        for (size_t epoch = 0; epoch < epochs_per_role; ++epoch) {
            ASSERT_TRUE(target.begin_epoch()) << "after these frames:" << in_hex(last);
            last.clear();
            for (size_t i = 0; i < burst; ++i, kind = (kind + 1) % seed_names.size()) {
                // What does not parse never gets to a worker, and is for the test on the wire.
                const auto seed = target.seed(kind);
                v1::SeamFrame frame;
                do {
                    last.resize(i);
                    last.push_back(mutator.mutated(seed));
                } while (!frame.ParseFromString(last.back()));
                ++taken[kind];
                to_the_session[kind] += target.names_session(frame) ? 1 : 0;
                target.hand_over(std::move(frame), last.back().size());
            }
        }
        ASSERT_TRUE(target.begin_epoch()) << "after these frames:" << in_hex(last);
        target.close();
        EXPECT_TRUE(eventually([&] { return target.credited() >= target.sent(); }));
        EXPECT_EQ(target.credited(), target.sent()) << "one credit per frame";
        // Some mutations are harmless, and get as far as a good frame does.
        const uint64_t accepted =
            role == 0 ? target.tokens() : target.hop().control().executed_steps() - target.epochs();
        EXPECT_GT(accepted, 300U);
        std::cout << role_names[role] << ": accepted " << accepted;
        for (size_t i = 0; i < seed_names.size(); ++i) {
            EXPECT_GE(taken[i], least_of_a_kind) << seed_names[i];
            EXPECT_GE(to_the_session[i], least_to_the_session) << seed_names[i];
            std::cout << ", " << seed_names[i] << ' ' << taken[i] << " (" << to_the_session[i] << " to the session)";
            in_all += taken[i];
        }
        std::cout << std::endl;
    }
    EXPECT_GE(in_all, least_in_all);
    expect_unharmed();
}

TEST_F(RouteUnderAttack, SurvivesMutatedFramesOnTheWire) {
    constexpr size_t epochs_per_role = 220;
    FrameMutator mutator(7);
    for (uint32_t role = 0; role < role_names.size(); ++role) {
        SCOPED_TRACE(role_names[role]);
        Target target(*hops[role], role);
        uint64_t taken = 0;
        uint64_t malformed = 0;
        size_t kind = 0;
        std::vector<std::string> last;
        for (size_t epoch = 0; epoch < epochs_per_role; ++epoch) {
            ASSERT_TRUE(target.begin_epoch()) << "after these frames:" << in_hex(last);
            last.clear();
            for (size_t i = 0; i < burst; ++i, kind = (kind + 1) % seed_names.size()) {
                last.push_back(mutator.mutated(target.seed(kind)));
                SeamPeer vandal(target.hop().address().address);  // its own stream: one that is no frame ends it
                vandal.send_raw(last.back());
                const auto status = vandal.finish();
                if (status.ok()) {
                    ++taken;
                } else {
                    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
                        << status.error_message() << in_hex({last.back()});
                    ++malformed;
                }
            }
        }
        ASSERT_TRUE(target.begin_epoch()) << "after these frames:" << in_hex(last);
        target.close();
        EXPECT_GT(taken, epochs_per_role * burst / 8);
        EXPECT_GT(malformed, epochs_per_role * burst / 20);
        std::cout << role_names[role] << ": taken " << taken << ", malformed " << malformed << std::endl;
    }
    expect_unharmed();
}

}  // namespace
}  // namespace meshnet::test
