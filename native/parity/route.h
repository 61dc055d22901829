// A route of engines in one process: what the workers do over the network, without the network.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/shard_engine.h"

namespace meshnet::parity {

class Route {
  public:
    // Loads one engine per range between the cuts ([] is the whole model).
    Status load(EngineConfig config, const std::vector<uint32_t> & cuts);

    // Opens a session on every hop, in slot order.
    Status open();
    Status close();
    Status rollback(uint32_t position);

    // Runs tokens from the current position through all hops; the last token's logits if asked for.
    // `tamper` is applied to the first hop's outgoing boundary (negative controls).
    struct Tamper {
        bool boundary = false;   // change one bit of every boundary that crosses the first seam
        bool token_ids = false;  // wrong token ids for all hops but the head
    };
    Status run(const std::vector<int32_t> & tokens, bool want_logits, std::vector<float> & logits,
               const Tamper & tamper);
    Status run(const std::vector<int32_t> & tokens, bool want_logits, std::vector<float> & logits) {
        return run(tokens, want_logits, logits, Tamper());
    }

    const std::vector<std::unique_ptr<ShardEngine>> & engines() const {
        return engines_;
    }

  private:
    std::vector<std::unique_ptr<ShardEngine>> engines_;
    std::vector<int32_t> sequences_;
    uint32_t position_ = 0;
};

// One greedy generation: the logits row and the token of every step.
struct Trace {
    std::vector<int32_t> tokens;
    std::vector<std::vector<float>> logits;
};

// Prefills `prompt` in chunks, then decodes `n_new` tokens greedily. `forced` replaces the greedy choice (teacher
// forcing), so that a difference at one step does not hide the next.
Status generate(Route & route, const std::vector<int32_t> & prompt, uint32_t chunk, uint32_t n_new, Trace & trace,
                const std::vector<int32_t> * forced = nullptr, const Route::Tamper & tamper = {});

// Index of the first step whose logits differ in any bit, or -1.
int first_difference(const Trace & a, const Trace & b);

}  // namespace meshnet::parity
