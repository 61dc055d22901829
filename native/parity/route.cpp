#include "parity/route.h"

#include <algorithm>
#include <cstring>

namespace meshnet::parity {

Status Route::load(EngineConfig config, const std::vector<uint32_t> & cuts) {
    engines_.clear();
    int32_t start = 0;
    for (size_t i = 0; i <= cuts.size(); ++i) {
        config.layers = {start, i < cuts.size() ? static_cast<int32_t>(cuts[i]) : 0};
        std::unique_ptr<ShardEngine> engine;
        if (Status status = make_llama_engine(config, engine); !status.ok()) {
            return status;
        }
        if (!engines_.empty() &&
            engines_.back()->describe().boundary_out.digest() != engine->describe().boundary_in.digest()) {
            return {Code::illegal_cut, "the boundaries at layer " + std::to_string(start) + " differ"};
        }
        start = engine->describe().layers.end;
        engines_.push_back(std::move(engine));
    }
    return Status::success();
}

Status Route::open() {
    sequences_.assign(engines_.size(), -1);
    position_ = 0;
    for (size_t i = 0; i < engines_.size(); ++i) {
        if (Status status = engines_[i]->open_sequence(sequences_[i]); !status.ok()) {
            return status;
        }
    }
    return Status::success();
}

Status Route::close() {
    for (size_t i = 0; i < engines_.size(); ++i) {
        if (Status status = engines_[i]->close_sequence(sequences_[i]); !status.ok()) {
            return status;
        }
    }
    return Status::success();
}

Status Route::rollback(uint32_t position) {
    for (size_t i = 0; i < engines_.size(); ++i) {
        if (Status status = engines_[i]->rollback(sequences_[i], position); !status.ok()) {
            return status;
        }
    }
    position_ = position;
    return Status::success();
}

Status Route::run(const std::vector<int32_t> & tokens, bool want_logits, std::vector<float> & logits,
                  const Tamper & tamper) {
    std::vector<TensorData> boundary;
    for (size_t i = 0; i < engines_.size(); ++i) {
        Step step;
        step.sequence = sequences_[i];
        step.position = position_;
        step.tokens = tokens;
        step.boundary = std::move(boundary);
        if (i > 0 && tamper.token_ids) {
            for (int32_t & token : step.tokens) {
                token = token == 300 ? 301 : 300;
            }
        }
        if (i == 1 && tamper.boundary) {
            step.boundary.front().bytes[2] ^= 0x40;
        }
        if (want_logits && i + 1 == engines_.size()) {
            step.logits_at = {static_cast<uint32_t>(tokens.size() - 1)};
        }
        std::vector<StepResult> results;
        if (Status status = engines_[i]->execute({step}, results); !status.ok()) {
            return {status.code, "hop " + std::to_string(i) + ": " + status.message};
        }
        boundary = std::move(results.front().boundary);
        if (!results.front().logits.empty()) {
            logits = std::move(results.front().logits.front());
        }
    }
    position_ += static_cast<uint32_t>(tokens.size());
    return Status::success();
}

Status generate(Route & route, const std::vector<int32_t> & prompt, uint32_t chunk, uint32_t n_new, Trace & trace,
                const std::vector<int32_t> * forced, const Route::Tamper & tamper) {
    trace = {};
    if (Status status = route.open(); !status.ok()) {
        return status;
    }
    std::vector<float> logits;
    for (size_t done = 0; done < prompt.size(); done += chunk) {
        const size_t last = std::min(prompt.size(), done + chunk);
        const std::vector<int32_t> part(prompt.begin() + static_cast<long>(done),
                                        prompt.begin() + static_cast<long>(last));
        if (Status status = route.run(part, last == prompt.size(), logits, tamper); !status.ok()) {
            return status;
        }
    }
    for (uint32_t i = 0; i < n_new; ++i) {
        const auto greedy = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
        trace.tokens.push_back(greedy);
        trace.logits.push_back(std::move(logits));
        if (i + 1 < n_new) {
            const int32_t next = forced ? (*forced)[i] : greedy;
            if (Status status = route.run({next}, true, logits, tamper); !status.ok()) {
                return status;
            }
        }
    }
    return route.close();
}

int first_difference(const Trace & a, const Trace & b) {
    const size_t n = std::min(a.logits.size(), b.logits.size());
    for (size_t i = 0; i < n; ++i) {
        if (a.logits[i].size() != b.logits[i].size() ||
            std::memcmp(a.logits[i].data(), b.logits[i].data(), a.logits[i].size() * sizeof(float)) != 0) {
            return static_cast<int>(i);
        }
    }
    return a.logits.size() == b.logits.size() ? -1 : static_cast<int>(n);
}

}  // namespace meshnet::parity
