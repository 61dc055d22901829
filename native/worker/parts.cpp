#include "worker/parts.h"

#include <algorithm>
#include <exception>

#include "worker/clock.h"
#include "worker/log.h"
#include "worker/memory.h"

namespace meshnet {
namespace {

std::string range_text(int64_t start, int64_t end) {
    return std::to_string(start) + ":" + std::to_string(end);
}

std::string range_text(LayerRange layers) {
    return range_text(layers.start, layers.end);
}

Refusal shutting_down() {
    return {v1::REFUSAL_DRAINING, "this worker is shutting down; choose another", 0, 0};
}

std::string megabytes(uint64_t bytes) {
    return std::to_string((bytes + 999'999) / 1'000'000) + " MB";
}

// Of an engine's own vocabulary, per token (measured: 180).
constexpr uint64_t vocabulary_token_bytes = 200;

// About what a part takes besides the weights that it shares with the whole: by its share of the layers, but a
// vocabulary of its own, and step buffers as large as the whole's.
uint64_t estimated_bytes(const EngineDescription & whole, LayerRange layers) {
    const auto n = static_cast<uint64_t>(layers.end - layers.start);
    const auto n_whole = static_cast<uint64_t>(whole.layers.end - whole.layers.start);
    return vocabulary_token_bytes * whole.n_vocab + whole.compute_bytes +
           (whole.kv_bytes + whole.copied_bytes) / n_whole * n;
}

}  // namespace

Served::Served(std::unique_ptr<ShardEngine> loaded)
    : engine(std::move(loaded)), model(engine->describe()), rules(model) {}

Parts::Parts(const EngineDescription & whole, LoadPart load, PartOptions options, std::function<uint64_t()> free_bytes)
    : whole_(whole), load_(std::move(load)), options_(options),
      free_bytes_(free_bytes != nullptr ? std::move(free_bytes) : [] { return free_memory_bytes(); }) {}

Parts::~Parts() {
    stop();
    loader_.reset();
}

Refusal Parts::check(uint32_t start, uint32_t end) const {
    const auto own_start = static_cast<uint32_t>(whole_.layers.start);
    const auto own_end = static_cast<uint32_t>(whole_.layers.end);
    if (start == own_start && end == own_end) {
        return Refusal::none();
    }
    Refusal refusal{v1::REFUSAL_WRONG_LAYERS,
                    "this worker serves layers " + range_text(whole_.layers) + (enabled() ? "" : " as a whole") +
                        ", not " + range_text(start, end),
                    0, 0};
    if (!enabled() || start >= end || start < own_start || end > own_end) {
        return refusal;
    }
    for (const uint32_t layer : {start, end}) {
        if (whole_.boundary_at(static_cast<int32_t>(layer)) != nullptr) {
            continue;
        }
        refusal.message += ": it cannot be cut before layer " + std::to_string(layer);
        for (const auto & [cut, reason] : whole_.illegal_cuts) {
            refusal.message += cut == layer ? " (" + reason + ")" : "";
        }
        return refusal;
    }
    return Refusal::none();
}

Parts::Part * Parts::find(LayerRange layers) {
    const auto it = std::find_if(parts_.begin(), parts_.end(), [&](const Part & p) { return p.layers == layers; });
    return it == parts_.end() ? nullptr : &*it;
}

// New references come from get() alone, under the mutex: what is unused stays so while it is held.
bool Parts::is_used(const Part & part) {
    return part.served == nullptr || part.served.use_count() > 1;
}

Refusal Parts::make_room(ServedPtr & dropped) {
    if (parts_.size() < options_.max_parts) {
        return Refusal::none();
    }
    auto oldest = parts_.end();
    std::string layers;
    for (auto it = parts_.begin(); it != parts_.end(); ++it) {
        layers += (layers.empty() ? "" : ", ") + range_text(it->layers);
        if (!is_used(*it) && (oldest == parts_.end() || it->last_used_us < oldest->last_used_us)) {
            oldest = it;
        }
    }
    if (oldest == parts_.end()) {
        return {v1::REFUSAL_NO_CAPACITY, "sessions use other parts of this worker's range (" + layers + ")",
                parts_.size() + 1, options_.max_parts};
    }
    dropped = std::move(oldest->served);
    parts_.erase(oldest);
    return Refusal::none();
}

void Parts::get(LayerRange layers, int64_t now_us, Answer answer) {
    Refusal refusal;
    ServedPtr served;
    {
        std::lock_guard lock(mutex_);
        Part * part = find(layers);
        if (stopping_) {
            refusal = shutting_down();
        } else if (part == nullptr) {
            // Freed by the loading thread, before it takes memory itself.
            auto dropped = std::make_shared<ServedPtr>();
            if (refusal = make_room(*dropped); !refusal.refused()) {
                if (loader_ == nullptr) {
                    loader_ = std::make_unique<TaskThread>(options_.max_parts);
                }
                if (loader_->post([this, layers, dropped] {
                        dropped->reset();
                        load(layers);
                    })) {
                    part = &parts_.emplace_back();
                    part->layers = layers;
                } else {
                    refusal = {v1::REFUSAL_NO_CAPACITY, "other parts are being loaded; try again", 0, 0};
                }
            }
        }
        if (part != nullptr && part->served != nullptr) {
            part->last_used_us = now_us;
            served = part->served;
        } else if (!refusal.refused()) {
            part->waiting.push_back({std::move(answer), now_us + options_.patience_ms * 1000});
            return;
        }
    }
    answer(refusal, std::move(served));
}

void Parts::load(LayerRange layers) {
    const int64_t start_us = now_us();
    std::unique_ptr<ShardEngine> engine;
    const Status status = make(layers, engine);
    const int64_t end_us = now_us();
    ServedPtr served;
    Refusal refusal = refusal_of(status);
    if (status.ok()) {
        served = std::make_shared<const Served>(std::move(engine));
        const EngineDescription & d = served->model;
        log_info("loaded layers " + range_text(layers) + " as a part of " + range_text(whole_.layers) + " in " +
                 std::to_string((end_us - start_us) / 1000) + " ms; it takes " +
                 megabytes(d.kv_bytes + d.compute_bytes + d.copied_bytes) + " more");
    } else {
        refusal.message = "layers " + range_text(layers) + " cannot be served now: " + refusal.message;
        log_warning(refusal.message);
    }
    std::vector<std::pair<Answer, ServedPtr>> answers;
    {
        std::lock_guard lock(mutex_);
        Part & part = *find(layers);
        for (auto & each : part.waiting) {
            answers.emplace_back(std::move(each.answer), served);
        }
        part.waiting.clear();
        part.served = std::move(served);
        part.last_used_us = end_us;
        if (part.served == nullptr) {
            parts_.erase(parts_.begin() + (&part - parts_.data()));
        }
    }
    for (auto & [answer, part] : answers) {
        answer(refusal, std::move(part));
    }
}

Status Parts::make(LayerRange layers, std::unique_ptr<ShardEngine> & engine) const {
    {
        std::lock_guard lock(mutex_);
        if (stopping_) {
            return {Code::engine_failure, "this worker is shutting down"};
        }
    }
    const uint64_t needed = estimated_bytes(whole_, layers);
    if (const uint64_t free = free_bytes_(); needed > free) {
        return {Code::resource_exhausted,
                "that takes about " + megabytes(needed) + " of memory, and " + megabytes(free) + " are free"};
    }
    try {
        return load_(layers, engine);
    } catch (const std::exception & error) {
        return {Code::engine_failure, error.what()};
    }
}

bool Parts::needs_tick() const {
    std::lock_guard lock(mutex_);
    return !parts_.empty();
}

void Parts::tick(int64_t now_us) {
    std::vector<ServedPtr> dropped;
    std::vector<std::pair<Answer, std::string>> impatient;
    {
        std::lock_guard lock(mutex_);
        for (auto part = parts_.begin(); part != parts_.end();) {
            auto & waiting = part->waiting;
            for (auto it = waiting.begin(); it != waiting.end();) {
                if (it->until_us <= now_us) {
                    impatient.emplace_back(std::move(it->answer), range_text(part->layers));
                    it = waiting.erase(it);
                } else {
                    ++it;
                }
            }
            if (is_used(*part)) {
                part->last_used_us = now_us;
            }
            if (now_us - part->last_used_us > options_.linger_ms * 1000) {
                log_info("nobody uses layers " + range_text(part->layers) + " alone any more");
                dropped.push_back(std::move(part->served));
                part = parts_.erase(part);
            } else {
                ++part;
            }
        }
    }
    for (const auto & [answer, layers] : impatient) {
        answer({v1::REFUSAL_NO_CAPACITY, "layers " + layers + " are being loaded; try again", 0, 0}, nullptr);
    }
}

void Parts::stop() {
    std::vector<Waiting> refused;
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        for (auto & part : parts_) {
            std::move(part.waiting.begin(), part.waiting.end(), std::back_inserter(refused));
            part.waiting.clear();
        }
    }
    for (const auto & each : refused) {
        each.answer(shutting_down(), nullptr);
    }
}

}  // namespace meshnet
