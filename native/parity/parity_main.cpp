// Whole model against split, logit by logit. See docs/parity.md.
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "parity/sweep.h"

using meshnet::parity::Sweep;
using meshnet::parity::SweepOptions;

namespace {

constexpr const char * usage =
    R"(usage: meshnet-parity --model FILE [options]

  --routes LIST       routes separated by ';', each a list of cuts: "15;10,20"; "all" is every single cut, "finest" a
                      shard between any two legal cuts, "none" the one-shard route (default: all)
  --prompts LIST      prompt lengths in tokens (default: 1,7,100)
  --chunks LIST       prefill in chunks of so many tokens; 0 is at once (default: 0,64)
  --new N             tokens to generate (default: 16)
  --context N         tokens per session (default: 2048)
  --step-tokens N     most tokens of one batch (default: the context); windowed caches are as large as the window plus
                      this
  --threads N         (default: 1)
  --seed N            of the prompts (default: 1)
  --flash-attention 0|1  (default: 1)
  --controls          also check that a changed boundary, and wrong token ids where they are read, change the output
  --trace             print tokens and hashes of the logits rows instead of comparing

Prints one JSON line about the model, then one per route: result is "equal", "refused" (with the reason) or
"DIFFERENT". Exit code 0 if every route is equal or refused, 1 if not, 2 for bad usage.
)";

struct Options {
    SweepOptions sweep;
    std::string routes = "all";
    bool trace = false;
};

uint32_t number(const std::string & text) {
    size_t used = 0;
    unsigned long value = 0;
    try {
        value = std::stoul(text, &used);
    } catch (const std::exception &) {
        used = 0;
    }
    if (used == 0 || used != text.size() || text[0] == '-' || value > 10'000'000) {
        throw std::invalid_argument("'" + text + "' is not a whole number of at most 10000000");
    }
    return static_cast<uint32_t>(value);
}

std::vector<uint32_t> numbers(const std::string & text) {
    std::vector<uint32_t> result;
    std::stringstream stream(text);
    for (std::string item; std::getline(stream, item, ',');) {
        result.push_back(number(item));
    }
    return result;
}

Options parse(int argc, char ** argv) {
    Options options;
    SweepOptions & sweep = options.sweep;
    sweep.engine.sequences = 1;
    sweep.engine.session_tokens = 2048;
    sweep.engine.step_tokens = 0;
    sweep.engine.threads = 1;
    const std::map<std::string, std::function<void(const std::string &)>> readers = {
        {"--model", [&](const auto & value) { sweep.engine.model_path = value; }},
        {"--routes", [&](const auto & value) { options.routes = value; }},
        {"--prompts", [&](const auto & value) { sweep.prompts = numbers(value); }},
        {"--chunks", [&](const auto & value) { sweep.chunks = numbers(value); }},
        {"--new", [&](const auto & value) { sweep.n_new = number(value); }},
        {"--context", [&](const auto & value) { sweep.engine.session_tokens = number(value); }},
        {"--step-tokens", [&](const auto & value) { sweep.engine.step_tokens = number(value); }},
        {"--threads", [&](const auto & value) { sweep.engine.threads = static_cast<int32_t>(number(value)); }},
        {"--seed", [&](const auto & value) { sweep.seed = number(value); }},
        {"--flash-attention", [&](const auto & value) { sweep.engine.flash_attention = number(value) != 0; }},
    };
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--controls") {
            sweep.controls = true;
        } else if (name == "--trace") {
            options.trace = true;
        } else if (const auto reader = readers.find(name); reader == readers.end() || i + 1 == argc) {
            throw std::invalid_argument((reader == readers.end() ? "unknown argument " : "no value for ") + name);
        } else {
            reader->second(argv[++i]);
        }
    }
    if (sweep.engine.step_tokens == 0) {
        sweep.engine.step_tokens = sweep.engine.session_tokens;
    }
    if (sweep.engine.model_path.empty() || sweep.prompts.empty() || sweep.chunks.empty() || sweep.n_new == 0) {
        throw std::invalid_argument("--model is needed, and at least one prompt, chunk and new token");
    }
    return options;
}

std::vector<std::vector<uint32_t>> parse_routes(const std::string & text, const meshnet::EngineDescription & whole) {
    std::vector<std::vector<uint32_t>> routes;
    std::stringstream stream(text);
    for (std::string item; std::getline(stream, item, ';');) {
        if (item == "all") {
            for (uint32_t k = 1; k < whole.n_layer; ++k) {
                routes.push_back({k});
            }
        } else if (item == "finest") {
            routes.push_back(whole.legal_cuts);
        } else {
            routes.push_back(item == "none" ? std::vector<uint32_t>() : numbers(item));
        }
    }
    return routes;
}

}  // namespace

int main(int argc, char ** argv) {
    try {
        const Options options = parse(argc, argv);
        Sweep sweep(options.sweep);
        if (!sweep.start()) {
            return 1;
        }
        bool right = true;
        for (const auto & cuts : parse_routes(options.routes, sweep.whole())) {
            right = (options.trace ? sweep.trace(cuts) : sweep.check(cuts)) && right;
        }
        return right ? 0 : 1;
    } catch (const std::exception & e) {
        std::cerr << "meshnet-parity: " << e.what() << "\n\n" << usage;
        return 2;
    }
}
