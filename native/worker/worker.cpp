#include "worker/worker.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "worker/clock.h"
#include "worker/convert.h"

namespace meshnet {
namespace {

// Rises when workers of before and after could not talk to each other on the seam.
constexpr const char * seam_revision = "+seam:2";

// Longest text or token list of one vocabulary call.
constexpr size_t max_text_bytes = 8 << 20;

uint64_t resident_bytes() {
    uint64_t total_pages = 0;
    uint64_t resident_pages = 0;
    std::ifstream statm("/proc/self/statm");
    statm >> total_pages >> resident_pages;
    return resident_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Worker::Worker(std::unique_ptr<ShardEngine> engine, WorkerOptions options, LoadPart load_part)
    : whole_(std::make_shared<const Served>(std::move(engine))), vocabulary_(*whole_->engine), model_(whole_->model),
      rules_(whole_->rules), options_(std::move(options)), parts_(model_, std::move(load_part), options_.parts),
      tickets_(options_.ticket_key, options_.shard_id), description_(make_description()),
      links_(*this, options_.connect_timeout_ms * 1000) {
    engine_thread_ = std::thread([this] { run_engine(); });
    housekeeping_thread_ = std::thread([this] { run_housekeeping(); });
}

Worker::~Worker() {
    stop();
}

v1::DescribeResponse Worker::make_description() const {
    v1::DescribeResponse d;
    d.set_shard_id(options_.shard_id);
    d.set_artifact_digest(options_.artifact_digest);
    d.set_architecture(model_.architecture);
    d.set_model_name(options_.model_name.empty() ? model_.model_name : options_.model_name);
    d.set_n_layer(model_.n_layer);
    d.set_n_vocab(model_.n_vocab);
    d.set_n_ctx_train(model_.n_ctx_train);
    d.mutable_layers()->set_start(static_cast<uint32_t>(model_.layers.start));
    d.mutable_layers()->set_end(static_cast<uint32_t>(model_.layers.end));
    *d.mutable_boundary_in() = to_wire(model_.boundary_in);
    *d.mutable_boundary_out() = to_wire(model_.boundary_out);
    d.set_needs_token_ids(model_.needs_token_ids);
    d.mutable_legal_cuts()->Add(model_.legal_cuts.begin(), model_.legal_cuts.end());
    for (size_t i = 0; i < model_.cut_boundaries.size() && parts_.enabled(); ++i) {
        *d.add_cut_boundaries() = to_wire(model_.cut_boundaries[i]);
    }
    d.set_session_capacity_tokens(std::min(model_.session_tokens, max_session_tokens));
    d.set_session_slots(model_.sequences);
    d.set_kv_bytes_per_token(model_.kv_bytes_per_token);
    d.set_weight_bytes(model_.weight_bytes);
    d.set_kv_bytes(model_.kv_bytes);
    d.set_compute_bytes(model_.compute_bytes);
    d.set_compatibility_id(model_.compatibility_id + seam_revision);
    d.set_build_id(model_.build_id);
    d.set_engine(model_.engine);
    d.set_max_step_tokens(rules_.max_step_tokens());
    d.set_chat_template(model_.chat_template);
    d.set_bos_token(model_.bos_token);
    d.set_eos_token(model_.eos_token);
    d.set_add_bos(model_.add_bos);
    d.set_can_rollback(model_.can_rollback);
    d.set_chunk_tokens(std::min(options_.chunk_tokens, rules_.max_step_tokens()));
    return d;
}

v1::StatusResponse Worker::status() const {
    v1::StatusResponse status;
    {
        std::lock_guard lock(mutex_);
        status = totals_;
        status.set_open_sessions(static_cast<uint32_t>(sessions_.size()));
        status.set_draining(draining_);
        uint64_t kv_tokens = 0;
        uint32_t queued_frames = 0;
        for (const auto & [id, session] : sessions_) {
            kv_tokens += session->history.length();
            queued_frames += static_cast<uint32_t>(session->inbox.size());
        }
        status.set_kv_tokens(kv_tokens);
        status.set_queued_frames(queued_frames);
    }
    status.set_session_slots(model_.sequences);
    status.set_resident_bytes(resident_bytes());
    return status;
}

Refusal Worker::tokenize(const v1::TokenizeRequest & request, v1::TokenizeResponse & response) const {
    if (auto refusal = tickets_.check(request.ticket(), unix_now_s()); refusal.refused()) {
        return refusal;
    }
    if (request.text().size() > max_text_bytes) {
        return {v1::REFUSAL_TOO_LONG, "the text is too long to tokenize", request.text().size(), max_text_bytes};
    }
    std::vector<int32_t> tokens;
    const auto status = vocabulary_.tokenize(request.text(), request.add_special(), request.parse_special(), tokens);
    response.mutable_tokens()->Add(tokens.begin(), tokens.end());
    return refusal_of(status);
}

Refusal Worker::detokenize(const v1::DetokenizeRequest & request, v1::DetokenizeResponse & response) const {
    if (auto refusal = tickets_.check(request.ticket(), unix_now_s()); refusal.refused()) {
        return refusal;
    }
    for (const uint32_t token : request.tokens()) {
        if (auto refusal = rules_.check_token(token); refusal.refused()) {
            return refusal;
        }
        if (const auto status = vocabulary_.piece(static_cast<int32_t>(token), *response.add_pieces()); !status.ok()) {
            return refusal_of(status);
        }
    }
    return Refusal::none();
}

void Worker::wake() {
    std::lock_guard lock(mutex_);
    engine_wake_.notify_one();
}

void Worker::drain() {
    {
        std::lock_guard lock(mutex_);
        draining_ = true;
    }
    parts_.stop();
}

bool Worker::wait_drained(int64_t timeout_ms) {
    std::unique_lock lock(mutex_);
    return drained_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return sessions_.empty(); });
}

void Worker::stop() {
    parts_.stop();
    Effects effects;
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        const auto sessions = sessions_;
        for (const auto & [id, session] : sessions) {
            remove(session, "the worker is shutting down", effects);
        }
        engine_wake_.notify_all();
        housekeeping_wake_.notify_all();
    }
    effects.perform();
    if (engine_thread_.joinable()) {
        engine_thread_.join();
    }
    if (housekeeping_thread_.joinable()) {
        housekeeping_thread_.join();
    }
    links_.shutdown();
}

Worker::SessionPtr Worker::find(const std::string & session_id) const {
    const auto it = sessions_.find(session_id);
    return it == sessions_.end() ? nullptr : it->second;
}

}  // namespace meshnet
