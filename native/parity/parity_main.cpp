// Whole model against split, logit by logit.
//
//   meshnet-parity --model FILE [--routes "15;10,20;all"] [--prompts 1,7,100,1500] [--chunks 0,64] [--new 128]
//                  [--threads 2] [--context 2048] [--seed 1] [--controls]
//
// --routes: routes separated by ';', each a list of cuts; "all" means every single cut, "none" the one-shard route.
// A chunk of 0 prefills the prompt at once. Prints one JSON line per route: {"route","result","cases",...}; result is
// "equal", "refused" (with the reason) or "DIFFERENT". Exit code 1 if any route differs, or if a control does not bite.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <random>
#include <sstream>

#include "parity/route.h"

using meshnet::Code;
using meshnet::EngineConfig;
using meshnet::Status;
using meshnet::parity::first_difference;
using meshnet::parity::generate;
using meshnet::parity::Route;
using meshnet::parity::Trace;

namespace {

struct Options {
    EngineConfig engine;
    std::string routes = "all";
    std::vector<uint32_t> prompts = {1, 7, 100};
    std::vector<uint32_t> chunks = {0, 64};
    uint32_t n_new = 16;
    uint32_t seed = 1;
    bool controls = false;
};

std::vector<uint32_t> numbers(const std::string & text) {
    std::vector<uint32_t> result;
    std::stringstream stream(text);
    for (std::string item; std::getline(stream, item, ',');) {
        result.push_back(static_cast<uint32_t>(std::stoul(item)));
    }
    return result;
}

std::string quoted(const std::string & text) {
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            result += '\\';
        }
        result += c == '\n' ? ' ' : c;
    }
    return result + "\"";
}

// Printable words of the model's own vocabulary, seeded.
std::vector<int32_t> make_prompt(const meshnet::ShardEngine & engine, uint32_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> prompt;
    std::string bytes;
    while (prompt.size() < n) {
        const auto token = static_cast<int32_t>(random() % engine.describe().n_vocab);
        if (engine.piece(token, bytes).ok() && !bytes.empty() && !engine.is_eog(token)) {
            prompt.push_back(token);
        }
    }
    return prompt;
}

Options parse(int argc, char ** argv) {
    Options options;
    options.engine.sequences = 1;
    options.engine.session_tokens = 2048;
    options.engine.threads = 2;
    std::map<std::string, std::string> values;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--controls") {
            options.controls = true;
        } else if (i + 1 < argc && name.rfind("--", 0) == 0) {
            values[name] = argv[++i];
        } else {
            throw std::invalid_argument("unknown argument " + name);
        }
    }
    for (const auto & [name, value] : values) {
        if (name == "--model") {
            options.engine.model_path = value;
        } else if (name == "--routes") {
            options.routes = value;
        } else if (name == "--prompts") {
            options.prompts = numbers(value);
        } else if (name == "--chunks") {
            options.chunks = numbers(value);
        } else if (name == "--new") {
            options.n_new = static_cast<uint32_t>(std::stoul(value));
        } else if (name == "--threads") {
            options.engine.threads = std::stoi(value);
        } else if (name == "--context") {
            options.engine.session_tokens = static_cast<uint32_t>(std::stoul(value));
        } else if (name == "--seed") {
            options.seed = static_cast<uint32_t>(std::stoul(value));
        } else {
            throw std::invalid_argument("unknown argument " + name);
        }
    }
    options.engine.step_tokens = options.engine.session_tokens;
    if (options.engine.model_path.empty()) {
        throw std::invalid_argument("--model FILE is needed");
    }
    return options;
}

std::vector<std::vector<uint32_t>> parse_routes(const std::string & text, uint32_t n_layer) {
    std::vector<std::vector<uint32_t>> routes;
    std::stringstream stream(text);
    for (std::string item; std::getline(stream, item, ';');) {
        if (item == "all") {
            for (uint32_t k = 1; k < n_layer; ++k) {
                routes.push_back({k});
            }
        } else {
            routes.push_back(item == "none" ? std::vector<uint32_t>() : numbers(item));
        }
    }
    return routes;
}

class Sweep {
  public:
    explicit Sweep(const Options & options) : options_(options) {}

    Status start() {
        return whole_.load(options_.engine, {});
    }

    const meshnet::EngineDescription & whole() const {
        return whole_.engines().front()->describe();
    }

    // True unless the route is wrong: a refusal is right, a difference is not.
    bool check(const std::vector<uint32_t> & cuts) {
        std::string name;
        for (const uint32_t cut : cuts) {
            name += (name.empty() ? "" : ",") + std::to_string(cut);
        }
        Route route;
        Status status = route.load(options_.engine, cuts);
        if (!status.ok()) {
            report(name, status.code == Code::illegal_cut ? "refused" : "FAILED", status.message);
            return status.code == Code::illegal_cut;
        }
        size_t cases = 0;
        for (const uint32_t n_prompt : options_.prompts) {
            for (const uint32_t chunk_option : options_.chunks) {
                const uint32_t chunk = chunk_option == 0 ? n_prompt : chunk_option;
                if (chunk_option != 0 && chunk_option >= n_prompt) {
                    continue;  // the same as prefilling at once
                }
                const Trace * expected = reference(n_prompt, chunk, status);
                Trace trace;
                if (expected) {
                    status = generate(route, prompt(n_prompt), chunk, options_.n_new, trace, &expected->tokens);
                }
                if (!status.ok()) {
                    report(name, "FAILED", status.message);
                    return false;
                }
                const int step = first_difference(*expected, trace);
                if (step >= 0 || expected->tokens != trace.tokens) {
                    report(name, "DIFFERENT",
                           "prompt " + std::to_string(n_prompt) + ", chunk " + std::to_string(chunk) + ", step " +
                               std::to_string(step));
                    return false;
                }
                ++cases;
            }
        }
        report(name, "equal", std::to_string(cases) + " cases of " + std::to_string(options_.n_new) + " tokens");
        return !options_.controls || cuts.size() != 1 || controls(name, route);
    }

  private:
    std::vector<int32_t> prompt(uint32_t n) const {
        return make_prompt(*whole_.engines().front(), n, options_.seed + n);
    }

    const Trace * reference(uint32_t n_prompt, uint32_t chunk, Status & status) {
        const auto key = std::make_pair(n_prompt, chunk);
        auto it = references_.find(key);
        if (it == references_.end()) {
            Trace trace;
            status = generate(whole_, prompt(n_prompt), chunk, options_.n_new, trace);
            if (!status.ok()) {
                return nullptr;
            }
            it = references_.emplace(key, std::move(trace)).first;
        }
        return &it->second;
    }

    // A parity test that cannot fail proves nothing: a changed boundary must change the output, and wrong token ids on
    // the second shard must change it exactly if that shard says that it reads them.
    bool controls(const std::string & name, Route & route) {
        const uint32_t n_prompt = options_.prompts.back();
        Status status;
        const Trace * expected = reference(n_prompt, n_prompt, status);
        Trace tampered;
        Trace misled;
        if (expected) {
            Route::Tamper boundary;
            boundary.boundary = true;
            status = generate(route, prompt(n_prompt), n_prompt, options_.n_new, tampered, &expected->tokens, boundary);
        }
        if (status.ok()) {
            Route::Tamper ids;
            ids.token_ids = true;
            status = generate(route, prompt(n_prompt), n_prompt, options_.n_new, misled, &expected->tokens, ids);
        }
        if (!status.ok()) {
            report(name, "FAILED", status.message);
            return false;
        }
        const bool bites = first_difference(*expected, tampered) >= 0;
        const bool reads_ids = route.engines().back()->describe().needs_token_ids;
        const bool ids_bite = first_difference(*expected, misled) >= 0;
        const bool right = bites && ids_bite == reads_ids;
        report(name, right ? "controls" : "CONTROL FAILED",
               std::string("changed boundary ") + (bites ? "changes" : "does not change") +
                   " the output, wrong token ids " + (ids_bite ? "change" : "do not change") + " it, token ids are " +
                   (reads_ids ? "" : "not ") + "read");
        return right;
    }

    static void report(const std::string & name, const std::string & result, const std::string & detail) {
        std::cout << "{\"cuts\":" << quoted(name) << ",\"result\":" << quoted(result)
                  << ",\"detail\":" << quoted(detail) << "}" << std::endl;
    }

    Options options_;
    Route whole_;
    std::map<std::pair<uint32_t, uint32_t>, Trace> references_;
};

}  // namespace

int main(int argc, char ** argv) {
    try {
        const Options options = parse(argc, argv);
        Sweep sweep(options);
        if (Status status = sweep.start(); !status.ok()) {
            std::cerr << status.message << std::endl;
            return 1;
        }
        bool right = true;
        for (const auto & cuts : parse_routes(options.routes, sweep.whole().n_layer)) {
            right = sweep.check(cuts) && right;
        }
        return right ? 0 : 1;
    } catch (const std::exception & e) {
        std::cerr << "meshnet-parity: " << e.what() << std::endl;
        return 2;
    }
}
