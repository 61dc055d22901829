// Routes of one model compared with the whole model; one JSON line per result on standard output.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "parity/route.h"

namespace meshnet::parity {

struct SweepOptions {
    EngineConfig engine;
    std::vector<uint32_t> prompts = {1, 7, 100};  // lengths in tokens
    std::vector<uint32_t> chunks = {0, 64};
    uint32_t n_new = 16;
    uint32_t seed = 1;
    bool controls = false;
};

class Sweep {
  public:
    explicit Sweep(const SweepOptions & options) : options_(options) {}

    // Loads the whole model and prints what it is; false if it is refused or cannot be loaded.
    bool start();

    const EngineDescription & whole() const {
        return whole_.engines().front()->describe();
    }

    // Compares one route; false if it is wrong: a refusal is right, a difference is not.
    bool check(const std::vector<uint32_t> & cuts);

    // Prints tokens and hashes of all logits rows of free-running generations; compares nothing.
    bool trace(const std::vector<uint32_t> & cuts);

  private:
    struct Case {
        uint32_t n_prompt;
        uint32_t chunk;
    };

    std::vector<Case> cases() const;
    Generation generation(const Case & c) const;
    // The whole model's trace; null, with a status, if there is none worth comparing with.
    const Trace * reference(const Case & c, Status & status);
    Status compare(Route & route, const Case & c, std::string & difference);
    bool controls(const std::vector<uint32_t> & cuts, Route & route);

    SweepOptions options_;
    Route whole_;
    std::map<std::pair<uint32_t, uint32_t>, Trace> references_;
};

}  // namespace meshnet::parity
