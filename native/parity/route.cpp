#include "parity/route.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace meshnet::parity {

Status Route::load(EngineConfig config, const std::vector<uint32_t> & cuts) {
    engines_.clear();
    sessions_.clear();
    int32_t start = 0;
    for (size_t i = 0; i <= cuts.size(); ++i) {
        config.layers = {start, i < cuts.size() ? static_cast<int32_t>(cuts[i]) : 0};
        std::unique_ptr<ShardEngine> engine;
        if (Status status = make_llama_engine(config, engine); !status.ok()) {
            return status;
        }
        if (!engines_.empty() &&
            engines_.back()->describe().boundary_out.digest() != engine->describe().boundary_in.digest()) {
            return {Code::engine_failure, "both sides of the cut before layer " + std::to_string(start) +
                                              " call it legal, but describe different boundaries"};
        }
        start = engine->describe().layers.end;
        engines_.push_back(std::move(engine));
    }
    return Status::success();
}

Status Route::open(size_t & session) {
    Session opened;
    for (const auto & engine : engines_) {
        int32_t sequence = -1;
        if (Status status = engine->open_sequence(sequence); !status.ok()) {
            return status;
        }
        opened.sequences.push_back(sequence);
    }
    session = sessions_.size();
    sessions_.push_back(std::move(opened));
    return Status::success();
}

Status Route::close(size_t session) {
    for (size_t i = 0; i < engines_.size(); ++i) {
        if (Status status = engines_[i]->close_sequence(sessions_[session].sequences[i]); !status.ok()) {
            return status;
        }
    }
    return Status::success();
}

Status Route::rollback(size_t session, uint32_t position) {
    for (size_t i = 0; i < engines_.size(); ++i) {
        if (Status status = engines_[i]->rollback(sessions_[session].sequences[i], position); !status.ok()) {
            return status;
        }
    }
    sessions_[session].position = position;
    return Status::success();
}

Status Route::run(const std::vector<Work> & batch, std::vector<Logits> & logits, const Tamper & tamper) {
    logits.assign(batch.size(), {});
    std::vector<StepResult> results(batch.size());
    for (size_t hop = 0; hop < engines_.size(); ++hop) {
        ShardEngine & engine = *engines_[hop];
        std::vector<Step> steps;
        for (size_t i = 0; i < batch.size(); ++i) {
            Step step;
            step.sequence = sessions_[batch[i].session].sequences[hop];
            step.position = sessions_[batch[i].session].position;
            step.tokens = batch[i].tokens;
            step.boundary = std::move(results[i].boundary);
            if (hop > 0 && tamper.token_ids) {
                for (int32_t & token : step.tokens) {
                    token = (token + 1) % static_cast<int32_t>(engine.describe().n_vocab);
                }
            }
            if (hop == 1 && tamper.boundary) {
                step.boundary.front().bytes[2] ^= 0x40;
            }
            if (batch[i].want_logits && engine.describe().is_tail()) {
                step.logits_at = {static_cast<uint32_t>(step.tokens.size() - 1)};
            }
            steps.push_back(std::move(step));
        }
        if (Status status = engine.execute(steps, results); !status.ok()) {
            return {status.code, "hop " + std::to_string(hop) + ": " + status.message};
        }
    }
    for (size_t i = 0; i < batch.size(); ++i) {
        sessions_[batch[i].session].position += static_cast<uint32_t>(batch[i].tokens.size());
        if (!results[i].logits.empty()) {
            logits[i] = std::move(results[i].logits.front());
        }
    }
    return Status::success();
}

Status Route::run(size_t session, const std::vector<int32_t> & tokens, Logits & logits) {
    std::vector<Logits> rows;
    const Status status = run({{session, tokens, true}}, rows);
    logits = std::move(rows.front());
    return status;
}

Status generate(Route & route, const Generation & generation, Trace & trace) {
    trace = {};
    const auto & prompt = generation.prompt;
    const size_t chunk = generation.chunk == 0 ? prompt.size() : generation.chunk;
    size_t session = 0;
    if (Status status = route.open(session); !status.ok()) {
        return status;
    }
    std::vector<Logits> rows;
    for (size_t done = 0; done < prompt.size();) {
        const size_t last = std::min(prompt.size(), done + chunk);
        const std::vector<int32_t> part(prompt.begin() + static_cast<long>(done),
                                        prompt.begin() + static_cast<long>(last));
        if (Status status = route.run({{session, part, last == prompt.size()}}, rows, generation.tamper);
            !status.ok()) {
            return status;
        }
        done = last;
    }
    for (uint32_t i = 0; i < generation.n_new; ++i) {
        const Logits & row = rows.front();
        const auto greedy = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
        trace.tokens.push_back(greedy);
        trace.logits.push_back(std::move(rows.front()));
        if (i + 1 < generation.n_new) {
            const int32_t next = generation.forced ? (*generation.forced)[i] : greedy;
            if (Status status = route.run({{session, {next}, true}}, rows, generation.tamper); !status.ok()) {
                return status;
            }
        }
    }
    return route.close(session);
}

std::vector<int32_t> make_prompt(const ShardEngine & engine, uint32_t n_tokens, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> prompt;
    std::string bytes;
    for (uint32_t tries = 0; prompt.size() < n_tokens; ++tries) {
        const auto token = static_cast<int32_t>(random() % engine.describe().n_vocab);
        const bool printable = engine.piece(token, bytes).ok() && !bytes.empty();
        // A vocabulary without any text is possible: then any token will do.
        if (!engine.is_eog(token) && (printable || tries > 100 * n_tokens)) {
            prompt.push_back(token);
        }
    }
    return prompt;
}

bool bit_equal(const Logits & a, const Logits & b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

int first_difference(const Trace & a, const Trace & b) {
    const size_t n = std::min(a.logits.size(), b.logits.size());
    for (size_t i = 0; i < n; ++i) {
        if (!bit_equal(a.logits[i], b.logits[i]) || a.tokens[i] != b.tokens[i]) {
            return static_cast<int>(i);
        }
    }
    return a.logits.size() == b.logits.size() ? -1 : static_cast<int>(n);
}

}  // namespace meshnet::parity
