// A route of engines in one process: what the workers do over the network, without the network.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/shard_engine.h"

namespace meshnet::parity {

using Logits = std::vector<float>;

// Changes on the way, for negative controls.
struct Tamper {
    bool boundary = false;   // one bit of every boundary that crosses the first seam
    bool token_ids = false;  // wrong token ids for all hops but the head
};

class Route {
  public:
    // Loads one engine per range between the cuts ([] is the whole model).
    Status load(EngineConfig config, const std::vector<uint32_t> & cuts);

    // Opens a session on every hop. Sessions are numbered from 0 in the order of open().
    Status open(size_t & session);
    Status close(size_t session);
    Status rollback(size_t session, uint32_t position);

    // Tokens of one session, from its current position on.
    struct Work {
        size_t session = 0;
        std::vector<int32_t> tokens;
        bool want_logits = true;  // of the last token
    };

    // Runs the work through all hops as one batch; logits are empty where not asked for.
    Status run(const std::vector<Work> & batch, std::vector<Logits> & logits, const Tamper & tamper = {});
    Status run(size_t session, const std::vector<int32_t> & tokens, Logits & logits);

    const std::vector<std::unique_ptr<ShardEngine>> & engines() const {
        return engines_;
    }

  private:
    struct Session {
        std::vector<int32_t> sequences;  // one per hop
        uint32_t position = 0;
    };

    std::vector<std::unique_ptr<ShardEngine>> engines_;
    std::vector<Session> sessions_;
};

// One greedy generation: the logits row and the token of every step.
struct Trace {
    std::vector<int32_t> tokens;
    std::vector<Logits> logits;
};

struct Generation {
    std::vector<int32_t> prompt;
    uint32_t chunk = 0;  // prefill in chunks of so many tokens; 0: at once
    uint32_t n_new = 0;
    const std::vector<int32_t> * forced = nullptr;  // replaces the greedy choice (teacher forcing), so that a
                                                    // difference at one step does not hide the next
    Tamper tamper;
};

Status generate(Route & route, const Generation & generation, Trace & trace);

// Printable tokens of the model's own vocabulary, seeded.
std::vector<int32_t> make_prompt(const ShardEngine & engine, uint32_t n_tokens, uint32_t seed);

bool bit_equal(const Logits & a, const Logits & b);

// Index of the first step whose logits or tokens differ in any bit, or -1.
int first_difference(const Trace & a, const Trace & b);

}  // namespace meshnet::parity
