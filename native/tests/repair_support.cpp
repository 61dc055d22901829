#include "tests/repair_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "worker/prefix.h"

namespace meshnet::test {
namespace {

std::vector<std::unique_ptr<Hop>> make_all(const RepairCase & repair_case) {
    std::vector<std::unique_ptr<Hop>> hops;
    for (size_t i = 0; i < repair_case.n_hops; ++i) {
        hops.push_back(repair_case.make_hop(i));
    }
    return hops;
}

TestSession session_over(const std::vector<std::unique_ptr<Hop>> & hops, const std::string & id, uint64_t epoch) {
    TestSession session(addresses(hops), id);
    session.epoch = epoch;
    session.token_capacity = hops[0]->address().description.session_capacity_tokens();
    return session;
}

// Where each hop goes on, given what it holds: at the end of a step, and at the beginning of the last known token's
// step at the latest. A hop that would have to take something back and cannot begins anew.
std::vector<uint32_t> resume_positions(const RepairCase & c, const std::vector<v1::OpenResponse> & opened,
                                       uint32_t n_known) {
    const auto n_prompt = static_cast<uint32_t>(c.prompt.size());
    uint32_t lowest = n_known > n_prompt ? n_known - 1 : (n_prompt - 1) / c.chunk_tokens * c.chunk_tokens;
    std::vector<uint32_t> positions(opened.size());
    for (size_t hop = opened.size(); hop-- > 0;) {
        const uint32_t cached = opened[hop].cached_tokens();
        lowest = std::min(lowest, cached);
        if (lowest < cached && !c.can_rollback) {
            lowest = 0;
        }
        positions[hop] = lowest;
    }
    return positions;
}

v1::GenerateRequest request_from(const RepairCase & c, const TestSession & session, const std::vector<uint32_t> & known,
                                 const std::vector<uint32_t> & resume_at) {
    v1::GenerateRequest request;
    *request.mutable_ticket() = session.ticket();
    const uint32_t start = resume_at.empty() ? 0 : resume_at[0];
    PrefixHistory prefix;
    prefix.append({known.begin(), known.begin() + start});
    request.mutable_tokens()->Add(known.begin() + start, known.end());
    request.set_cached_tokens(start);
    request.set_prefix_hash(prefix.hash());
    *request.mutable_sampling() = c.sampling;
    const auto n_prompt = static_cast<uint32_t>(c.prompt.size());
    const auto n_known = static_cast<uint32_t>(known.size());
    request.set_max_new_tokens(c.n_new - (n_known - n_prompt));
    request.set_replayed_tokens(n_known - std::max(start, n_prompt));
    request.set_chunk_tokens(c.chunk_tokens);
    request.set_ignore_eog(true);
    request.mutable_resume_at()->Add(resume_at.begin(), resume_at.end());
    return request;
}

void take_steps(Hop & hop, std::vector<ControlledEngine::StepShape> & steps) {
    const auto taken = hop.control().taken_steps();
    steps.insert(steps.end(), taken.begin(), taken.end());
}

}  // namespace

Answer undisturbed(const RepairCase & c) {
    auto hops = make_all(c);
    auto session = session_over(hops, new_session_id(), 1);
    session.open();
    const auto outcome = session.client(0).generate(request_from(c, session, c.prompt, {}));
    EXPECT_TRUE(outcome.finished.has_value()) << (outcome.failed.has_value() ? outcome.failed->message() : "");
    Answer run;
    run.tokens = outcome.tokens;
    run.steps.resize(c.n_hops);
    for (size_t hop = 0; hop < c.n_hops; ++hop) {
        take_steps(*hops[hop], run.steps[hop]);
    }
    return run;
}

Answer repaired(const RepairCase & c, const std::vector<Interruption> & interruptions) {
    Answer run;
    run.steps.resize(c.n_hops);
    const std::string id = new_session_id();
    auto hops = make_all(c);
    std::vector<std::unique_ptr<Hop>> victims;
    std::vector<uint32_t> known = c.prompt;
    std::vector<uint32_t> resume_at;
    for (uint64_t epoch = 1; epoch <= interruptions.size() + 1; ++epoch) {
        auto session = session_over(hops, id, epoch);
        const auto opened = session.open();
        if (epoch > 1) {
            PrefixHistory prefix;
            prefix.append({known.begin(), known.end()});
            for (const auto & hop : opened) {
                if (hop.cached_tokens() <= prefix.length()) {
                    EXPECT_EQ(hop.prefix_hash(), prefix.hash_at(hop.cached_tokens()));
                }
            }
            resume_at = resume_positions(c, opened, prefix.length());
            run.resumed_at.push_back(resume_at);
        }
        const auto request = request_from(c, session, known, resume_at);
        Outcome outcome;
        if (epoch > interruptions.size()) {
            outcome = session.client(0).generate(request);
            EXPECT_TRUE(outcome.finished.has_value())
                << (outcome.failed.has_value() ? outcome.failed->message() : outcome.status.error_message());
        } else {
            const auto & interruption = interruptions[epoch - 1];
            auto & tail = hops.back()->control();
            tail.hold();
            tail.pass(interruption.tail_steps);
            grpc::ClientContext context;
            std::atomic<uint32_t> last_position{0};
            std::thread caller([&] {
                outcome = session.client(0).generate(
                    request,
                    [&](const v1::GenerateEvent & event) {
                        if (event.has_token()) {
                            last_position = event.token().position();
                        }
                    },
                    &context);
            });
            EXPECT_TRUE(tail.wait_held());
            // The token of the step before has come, if that one sampled.
            const auto steps = tail.taken_steps();
            const uint32_t done =
                steps.empty() ? 0 : steps.back().position + static_cast<uint32_t>(steps.back().tokens);
            EXPECT_TRUE(eventually([&] {
                return done < known.size() || interruption.tail_steps == 0 || last_position == done;
            })) << "no token for position "
                << done;
            context.TryCancel();
            caller.join();
            auto & victim = hops[interruption.victim];
            if (!interruption.victim_lives) {
                victim->stop();
            }
            tail.release();
            victims.push_back(std::exchange(victim, c.make_hop(interruption.victim)));
        }
        for (const auto & token : outcome.tokens) {
            known.push_back(token.token());
            run.tokens.push_back(token);
        }
        if (!victims.empty() && epoch <= interruptions.size()) {
            take_steps(*victims.back(), run.steps[interruptions[epoch - 1].victim]);
        }
    }
    for (size_t hop = 0; hop < c.n_hops; ++hop) {
        take_steps(*hops[hop], run.steps[hop]);
    }
    return run;
}

void expect_equal(const Answer & repaired, const Answer & undisturbed) {
    ASSERT_EQ(repaired.tokens.size(), undisturbed.tokens.size());
    for (size_t i = 0; i < repaired.tokens.size(); ++i) {
        ASSERT_EQ(repaired.tokens[i].SerializeAsString(), undisturbed.tokens[i].SerializeAsString())
            << "token " << i << ": " << repaired.tokens[i].ShortDebugString() << " instead of "
            << undisturbed.tokens[i].ShortDebugString();
    }
    for (size_t hop = 0; hop < undisturbed.steps.size(); ++hop) {
        const auto & shapes = undisturbed.steps[hop];
        const std::set<ControlledEngine::StepShape> expected(shapes.begin(), shapes.end());
        for (const auto & step : repaired.steps[hop]) {
            EXPECT_EQ(expected.count(step), 1U)
                << "hop " << hop << " took a step of " << step.tokens << " tokens at " << step.position;
        }
    }
}

}  // namespace meshnet::test
