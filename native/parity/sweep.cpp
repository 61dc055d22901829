#include "parity/sweep.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <iostream>

namespace meshnet::parity {

namespace {

std::string quoted(const std::string & text) {
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            result += '\\';
        }
        result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
    return result + "\"";
}

template <typename Items, typename Print>
std::string list(const Items & items, Print print) {
    std::string result = "[";
    for (const auto & item : items) {
        result += (result.size() > 1 ? "," : "") + print(item);
    }
    return result + "]";
}

template <typename Number>
std::string numbers(const std::vector<Number> & items) {
    return list(items, [](Number item) { return std::to_string(item); });
}

std::string schema_text(const BoundarySchema & schema) {
    std::string text;
    for (const TensorSpec & spec : schema.tensors) {
        text += (text.empty() ? "" : ", ") + spec.name + " " + dtype_name(spec.dtype) + " ";
        for (size_t i = 0; i < spec.shape.size(); ++i) {
            text += (i > 0 ? "x" : "") + std::to_string(spec.shape[i]);
        }
    }
    return text;
}

// What crosses the seams of a route, and which hops read token ids.
std::string route_fields(const Route & route) {
    std::vector<std::string> boundaries;
    std::vector<std::string> reads_token_ids;
    for (const auto & engine : route.engines()) {
        const EngineDescription & d = engine->describe();
        if (!d.is_tail()) {
            boundaries.push_back(quoted(schema_text(d.boundary_out)));
        }
        reads_token_ids.emplace_back(d.needs_token_ids ? "true" : "false");
    }
    const auto same = [](const std::string & text) { return text; };
    return ",\"boundaries\":" + list(boundaries, same) + ",\"reads_token_ids\":" + list(reads_token_ids, same);
}

void report(const std::vector<uint32_t> & cuts, const std::string & result, const std::string & detail,
            const std::string & fields = {}) {
    std::cout << "{\"cuts\":" << numbers(cuts) << ",\"result\":" << quoted(result) << ",\"detail\":" << quoted(detail)
              << fields << "}" << std::endl;
}

std::string hash_text(const Logits & row) {
    uint64_t hash = 0xcbf29ce484222325ULL;
    const auto * bytes = reinterpret_cast<const unsigned char *>(row.data());
    for (size_t i = 0; i < row.size() * sizeof(float); ++i) {
        hash = (hash ^ bytes[i]) * 0x100000001b3ULL;
    }
    char text[17];
    std::snprintf(text, sizeof(text), "%016" PRIx64, hash);
    return text;
}

// How two rows differ, for a person who has to find out why.
std::string difference_text(const Logits & a, const Logits & b) {
    size_t n_different = 0;
    float largest = 0.0F;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        if (!(a[i] == b[i])) {
            ++n_different;
            largest = std::max(largest, std::abs(a[i] - b[i]));
        }
    }
    return std::to_string(n_different) + " of " + std::to_string(a.size()) + " logits, by at most " +
           std::to_string(largest);
}

// True if comparing with this trace could show a difference.
bool is_telling(const Trace & trace) {
    return std::all_of(trace.logits.begin(), trace.logits.end(), [](const Logits & row) {
        const bool finite = std::all_of(row.begin(), row.end(), [](float value) { return std::isfinite(value); });
        return finite && *std::max_element(row.begin(), row.end()) > *std::min_element(row.begin(), row.end());
    });
}

}  // namespace

bool Sweep::start() {
    if (Status status = whole_.load(options_.engine, {}); !status.ok()) {
        report({}, status.code == Code::engine_failure ? "FAILED" : "refused", status.message);
        return false;
    }
    const EngineDescription & d = whole_.engines().front()->describe();
    const auto reason = [](const std::pair<uint32_t, std::string> & cut) {
        return "[" + std::to_string(cut.first) + "," + quoted(cut.second) + "]";
    };
    std::cout << "{\"architecture\":" << quoted(d.architecture) << ",\"n_layer\":" << d.n_layer
              << ",\"n_vocab\":" << d.n_vocab << ",\"legal_cuts\":" << numbers(d.legal_cuts)
              << ",\"illegal_cuts\":" << list(d.illegal_cuts, reason)
              << ",\"can_rollback\":" << (d.can_rollback ? "true" : "false") << "}" << std::endl;
    return true;
}

std::vector<Sweep::Case> Sweep::cases() const {
    std::vector<Case> result;
    for (const uint32_t n_prompt : options_.prompts) {
        for (const uint32_t chunk : options_.chunks) {
            // A chunk that holds the whole prompt is the same as prefilling at once.
            const Case c = {n_prompt, chunk >= n_prompt ? 0 : chunk};
            const auto same = [&](const Case & other) { return other.n_prompt == n_prompt && other.chunk == c.chunk; };
            if (std::none_of(result.begin(), result.end(), same)) {
                result.push_back(c);
            }
        }
    }
    return result;
}

Generation Sweep::generation(const Case & c) const {
    Generation result;
    result.prompt = make_prompt(*whole_.engines().front(), c.n_prompt, options_.seed + c.n_prompt);
    result.chunk = c.chunk;
    result.n_new = options_.n_new;
    return result;
}

const Trace * Sweep::reference(const Case & c, Status & status) {
    const auto key = std::make_pair(c.n_prompt, c.chunk);
    auto it = references_.find(key);
    if (it == references_.end()) {
        Trace trace;
        status = generate(whole_, generation(c), trace);
        if (status.ok() && !is_telling(trace)) {
            status = {Code::engine_failure, "the whole model's logits are all alike or not finite"};
        }
        if (!status.ok()) {
            status.message = "whole model: " + status.message;
            return nullptr;
        }
        it = references_.emplace(key, std::move(trace)).first;
    }
    return &it->second;
}

Status Sweep::compare(Route & route, const Case & c, std::string & difference) {
    Status status;
    const Trace * expected = reference(c, status);
    if (!expected) {
        return status;
    }
    Generation forced = generation(c);
    forced.forced = &expected->tokens;
    Trace trace;
    if (status = generate(route, forced, trace); !status.ok()) {
        return status;
    }
    if (const int step = first_difference(*expected, trace); step >= 0) {
        const auto i = static_cast<size_t>(step);
        difference = "prompt " + std::to_string(c.n_prompt) + ", chunk " + std::to_string(c.chunk) + ", step " +
                     std::to_string(step) + ": " + difference_text(expected->logits[i], trace.logits[i]);
    }
    return status;
}

bool Sweep::check(const std::vector<uint32_t> & cuts) {
    Route route;
    if (Status status = route.load(options_.engine, cuts); !status.ok()) {
        const bool refused = status.code == Code::illegal_cut;
        report(cuts, refused ? "refused" : "FAILED", status.message);
        return refused;
    }
    for (const Case & c : cases()) {
        std::string difference;
        if (Status status = compare(route, c, difference); !status.ok()) {
            report(cuts, "FAILED", status.message);
            return false;
        }
        if (!difference.empty()) {
            report(cuts, "DIFFERENT", difference);
            return false;
        }
    }
    report(cuts, "equal", std::to_string(cases().size()) + " cases of " + std::to_string(options_.n_new) + " tokens",
           route_fields(route));
    return !options_.controls || cuts.empty() || controls(cuts, route);
}

bool Sweep::trace(const std::vector<uint32_t> & cuts) {
    Route route;
    Status status = route.load(options_.engine, cuts);
    for (const Case & c : cases()) {
        const Generation free = generation(c);
        Trace trace;
        if (status.ok()) {
            status = generate(route, free, trace);
        }
        if (!status.ok()) {
            report(cuts, "FAILED", status.message);
            return false;
        }
        const auto hash = [](const Logits & row) { return quoted(hash_text(row)); };
        report(cuts, "trace", "",
               ",\"chunk\":" + std::to_string(c.chunk) + ",\"prompt\":" + numbers(free.prompt) +
                   ",\"tokens\":" + numbers(trace.tokens) + ",\"logits_fnv1a\":" + list(trace.logits, hash));
    }
    return true;
}

// A comparison that cannot fail proves nothing: a changed boundary must change the output, and wrong token ids after
// the first hop must change it exactly if one of those hops says that it reads them.
bool Sweep::controls(const std::vector<uint32_t> & cuts, Route & route) {
    const Case c = cases().back();
    Status status;
    const Trace * expected = reference(c, status);
    bool bites[2] = {};
    for (const bool ids : {false, true}) {
        if (!status.ok()) {
            break;
        }
        Generation tampered = generation(c);
        tampered.forced = &expected->tokens;
        tampered.tamper.boundary = !ids;
        tampered.tamper.token_ids = ids;
        Trace trace;
        status = generate(route, tampered, trace);
        bites[ids] = status.ok() && first_difference(*expected, trace) >= 0;
    }
    if (!status.ok()) {
        report(cuts, "FAILED", status.message);
        return false;
    }
    const auto & engines = route.engines();
    const bool reads_ids = std::any_of(engines.begin() + 1, engines.end(),
                                       [](const auto & engine) { return engine->describe().needs_token_ids; });
    const bool right = bites[false] && bites[true] == reads_ids;
    report(cuts, right ? "controls" : "CONTROL FAILED",
           std::string("a changed boundary ") + (bites[false] ? "changes" : "does not change") +
               " the output; wrong token ids " + (bites[true] ? "change" : "do not change") + " it; they are " +
               (reads_ids ? "" : "not ") + "read");
    return right;
}

}  // namespace meshnet::parity
