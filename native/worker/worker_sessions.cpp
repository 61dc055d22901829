// Worker: calls on sessions, from Open to Close.
#include <utility>

#include "worker/clock.h"
#include "worker/convert.h"
#include "worker/worker.h"

namespace meshnet {
namespace {

constexpr uint32_t max_hops = 1024;

std::string range_text(uint32_t start, uint32_t end) {
    return std::to_string(start) + ":" + std::to_string(end);
}

Refusal unknown_session() {
    return {v1::REFUSAL_UNKNOWN_SESSION,
            "no such session is open here; it was closed, timed out, or the worker restarted", 0, 0};
}

Refusal stale_epoch(uint64_t requested, uint64_t current) {
    return {v1::REFUSAL_STALE_EPOCH,
            "epoch " + std::to_string(requested) + " is not current here (" + std::to_string(current) + ")", requested,
            current};
}

}  // namespace

Refusal Worker::check_open(const v1::OpenRequest & request) const {
    if (auto refusal = tickets_.check(request.ticket(), unix_now_s()); refusal.refused()) {
        return refusal;
    }
    if (request.artifact_digest() != options_.artifact_digest) {
        return {v1::REFUSAL_WRONG_ARTIFACT,
                "this worker serves artifact '" + options_.artifact_digest + "', not '" +
                    printable(request.artifact_digest()) + "'",
                0, 0};
    }
    if (request.compatibility_id() != description_.compatibility_id()) {
        return {v1::REFUSAL_WRONG_BUILD,
                "this worker has compatibility id '" + description_.compatibility_id() + "', not '" +
                    printable(request.compatibility_id()) + "'",
                0, 0};
    }
    const auto & layers = request.layers();
    if (auto refusal = parts_.check(layers.start(), layers.end()); refusal.refused()) {
        return refusal;
    }
    const std::string in_digest = model_.boundary_at(static_cast<int32_t>(layers.start()))->digest();
    const std::string out_digest = model_.boundary_at(static_cast<int32_t>(layers.end()))->digest();
    if (request.boundary_in_digest() != in_digest || request.boundary_out_digest() != out_digest) {
        return {v1::REFUSAL_INCOMPATIBLE_BOUNDARY,
                "this worker's boundary digests are " + in_digest + " in and " + out_digest + " out", 0, 0};
    }
    if (request.token_capacity() == 0 || request.token_capacity() > description_.session_capacity_tokens()) {
        return {v1::REFUSAL_TOO_LONG,
                "a session holds 1 to " + std::to_string(description_.session_capacity_tokens()) + " tokens here",
                request.token_capacity(), description_.session_capacity_tokens()};
    }
    const uint32_t hop = request.hop_index();
    const uint32_t n_hops = request.n_hops();
    if (hop >= n_hops || n_hops > max_hops || (hop == 0) != (layers.start() == 0) ||
        (hop + 1 == n_hops) != (layers.end() == model_.n_layer)) {
        return bad_request("hop " + std::to_string(hop) + " of " + std::to_string(n_hops) + " does not match layers " +
                           range_text(layers.start(), layers.end()) + " of " + std::to_string(model_.n_layer));
    }
    if (hop + 1 < n_hops && !is_address(request.next().address())) {
        return bad_request("next.address must be host:port");
    }
    if (hop > 0 && !is_address(request.head().address())) {
        return bad_request("head.address must be host:port");
    }
    return Refusal::none();
}

// Whether the session may be opened; under the mutex.
Refusal Worker::check_room(const v1::Ticket & ticket) const {
    const auto session = find(ticket.session_id());
    if (session != nullptr && ticket.epoch() <= session->epoch) {
        return stale_epoch(ticket.epoch(), session->epoch);
    }
    if (session == nullptr && sessions_.size() >= model_.sequences) {
        return {v1::REFUSAL_NO_CAPACITY, "all session slots are taken", sessions_.size() + 1, model_.sequences};
    }
    if (draining_ || stopping_) {
        return {v1::REFUSAL_DRAINING, "this worker is shutting down; choose another", 0, 0};
    }
    return Refusal::none();
}

void Worker::open(const v1::OpenRequest & request, OpenReply reply) {
    Refusal refusal;
    {
        std::lock_guard lock(mutex_);
        if (draining_) {
            refusal = {v1::REFUSAL_DRAINING, "this worker is shutting down; choose another", 0, 0};
        }
    }
    if (!refusal.refused()) {
        refusal = check_open(request);
    }
    if (refusal.refused()) {
        reply(refusal, {});
        return;
    }
    const LayerRange layers = {static_cast<int32_t>(request.layers().start()),
                               static_cast<int32_t>(request.layers().end())};
    if (layers == model_.layers) {
        open_on(whole_, request, reply);
        return;
    }
    {
        std::lock_guard lock(mutex_);
        refusal = check_room(request.ticket());
    }
    if (refusal.refused()) {
        reply(refusal, {});
        return;
    }
    parts_.get(layers, now_us(), [this, request, reply](const Refusal & refused, ServedPtr part) {
        if (refused.refused()) {
            reply(refused, {});
        } else {
            open_on(part, request, reply);
        }
    });
    std::lock_guard lock(mutex_);
    housekeeping_wake_.notify_all();
}

// Opens the session on loaded layers; the request has been checked.
void Worker::open_on(const ServedPtr & served, const v1::OpenRequest & request, const OpenReply & reply) {
    // Connecting starts here, in the background, outside the mutex.
    const bool is_tail = request.hop_index() + 1 == request.n_hops();
    auto next_link = is_tail ? nullptr : links_.get(request.next().address());
    auto head_link = request.hop_index() > 0 ? links_.get(request.head().address()) : nullptr;

    const auto & id = request.ticket().session_id();
    const uint64_t epoch = request.ticket().epoch();
    Effects effects;
    {
        std::lock_guard lock(mutex_);
        auto session = find(id);
        if (const auto refusal = check_room(request.ticket()); refusal.refused()) {
            effects.replies.emplace_back([reply, refusal] { reply(refusal, {}); });
        } else {
            std::shared_ptr<v1::HopStats> ended;
            if (session == nullptr) {
                session = std::make_shared<Session>();
                session->id = id;
                sessions_.emplace(id, session);
                housekeeping_wake_.notify_all();
            } else {
                ended = std::exchange(session->stats, std::make_shared<v1::HopStats>());
                if (session->generation != nullptr) {
                    refuse(*session,
                           {v1::REFUSAL_STALE_EPOCH, "the session was opened again with epoch " + std::to_string(epoch),
                            0, 0},
                           effects);
                }
            }
            use_layers(*session, served, effects);
            place(*session, request, std::move(next_link), std::move(head_link), effects);
            if (session->next_link != nullptr && session->next_link->lost()) {
                peer_lost(*session, session->hop_index + 1, "the link broke", effects);
            } else if (session->head_link != nullptr && session->head_link->lost()) {
                peer_lost(*session, 0, "the link broke", effects);
            }
            // Nothing but a step that was begun in the old epoch changes either of them until the answer is made.
            auto answer = [session, ended, reply] {
                v1::OpenResponse response;
                if (ended != nullptr) {
                    *response.mutable_ended() = *ended;
                }
                response.set_cached_tokens(session->history.length());
                response.set_prefix_hash(session->history.hash());
                return [reply, response] { reply(Refusal::none(), response); };
            };
            if (session->computing) {
                session->when_idle.emplace_back([answer] { answer()(); });
            } else {
                effects.replies.emplace_back(answer());
            }
        }
    }
    effects.perform();
}

// What a session has cached of other layers is of no use to it.
void Worker::use_layers(Session & session, const ServedPtr & served, Effects & effects) {
    if (session.served == served) {
        return;
    }
    // A step that computes keeps the sequence until it ends (commit).
    if (!session.computing) {
        give_up_sequence(session.served, session);
        session.history.truncate(0);
    }
    effects.garbage.push_back(std::make_shared<ServedPtr>(std::exchange(session.served, served)));
}

void Worker::place(Session & session, const v1::OpenRequest & request, std::shared_ptr<Link> next,
                   std::shared_ptr<Link> head, Effects & effects) {
    discard_inbox(session, effects);
    effects.garbage.push_back(std::exchange(session.next_link, std::move(next)));
    effects.garbage.push_back(std::exchange(session.head_link, std::move(head)));
    session.epoch = request.ticket().epoch();
    session.hop_index = request.hop_index();
    session.n_hops = request.n_hops();
    session.next = request.next();
    session.head = request.head();
    session.inbound_stream = 0;
    session.inbound_lost_us = 0;
    session.token_capacity = request.token_capacity();
    session.idle_timeout_us =
        request.idle_timeout_s() > 0 ? int64_t{request.idle_timeout_s()} * 1'000'000 : options_.idle_timeout_ms * 1000;
    session.step_timeout_us = options_.step_timeout_ms * 1000;
    session.last_activity_us = now_us();
    session.gateway_seen_us = session.last_activity_us;
    session.opening.reset();
    session.unacknowledged_frames = 0;
    session.samples_outstanding = 0;
    session.samples_to_discard = 0;
    session.failure.reset();
    session.failure_report_pending = false;
    session.stats->set_hop_index(session.hop_index);
    session.stats->set_shard_id(options_.shard_id);
    *session.stats->mutable_layers() = request.layers();
}

Refusal Worker::check_generate(const v1::GenerateRequest & request) const {
    if (!model_.is_head()) {
        return bad_request("this worker is not the head of a route; call Generate where layer 0 is");
    }
    if (auto refusal = tickets_.check_authentic(request.ticket()); refusal.refused()) {
        return refusal;
    }
    if (auto refusal = rules_.check_tokens(request); refusal.refused()) {
        return refusal;
    }
    return rules_.check_sampling(request.sampling());
}

Refusal Worker::generate(const v1::GenerateRequest & original, std::shared_ptr<EventSink> sink) {
    if (auto refusal = check_generate(original); refusal.refused()) {
        return refusal;
    }
    v1::GenerateRequest request = original;
    if (request.chunk_tokens() == 0) {
        request.set_chunk_tokens(description_.chunk_tokens());
    }
    const int64_t now = now_us();
    Effects effects;
    {
        std::lock_guard lock(mutex_);
        const auto session = find(request.ticket().session_id());
        if (session == nullptr) {
            return unknown_session();
        }
        if (session->epoch != request.ticket().epoch()) {
            return stale_epoch(request.ticket().epoch(), session->epoch);
        }
        if (!session->is_head()) {
            return bad_request("this worker is not the head of the session's route");
        }
        if (session->generation != nullptr) {
            return bad_request("a generation of this session is already running");
        }
        const uint64_t needed = uint64_t{request.cached_tokens()} + static_cast<uint64_t>(request.tokens_size()) + 1;
        if (needed > session->token_capacity) {
            return {v1::REFUSAL_TOO_LONG, "the prompt and one more token do not fit the session", needed,
                    session->token_capacity};
        }
        if (request.cached_tokens() > session->history.length() ||
            (request.cached_tokens() > 0 &&
             request.prefix_hash() != session->history.hash_at(request.cached_tokens()))) {
            return {v1::REFUSAL_PREFIX_MISMATCH,
                    "the first " + std::to_string(request.cached_tokens()) + " tokens are not what this hop has cached",
                    request.cached_tokens(), session->history.length()};
        }
        if (auto refusal = FrameRules::check_resume(request, session->n_hops); refusal.refused()) {
            return refusal;
        }
        session->last_activity_us = now;
        session->gateway_seen_us = now;
        session->ready_since_us = now;
        session->step_timeout_us =
            (request.step_timeout_ms() > 0 ? int64_t{request.step_timeout_ms()} : options_.step_timeout_ms) * 1000;
        session->generation = std::make_unique<Generation>(request, session->token_capacity, sink, now);
        ++session->generation_no;
        if (session->failure.has_value()) {
            session->generation->fail(*session->failure);
            end_generation(*session, effects);
        }
        engine_wake_.notify_one();
    }
    effects.perform();
    return Refusal::none();
}

void Worker::cancel(const std::string & session_id, const EventSink * sink) {
    Effects effects;
    {
        std::lock_guard lock(mutex_);
        const auto session = find(session_id);
        if (session != nullptr && session->generation != nullptr && &session->generation->sink() == sink) {
            end_generation(*session, effects);
        }
    }
    effects.perform();
}

Refusal Worker::close(const v1::CloseRequest & request, v1::CloseResponse & response) {
    if (auto refusal = tickets_.check_authentic(request.ticket()); refusal.refused()) {
        return refusal;
    }
    Effects effects;
    {
        std::lock_guard lock(mutex_);
        const auto session = find(request.ticket().session_id());
        if (session == nullptr) {
            response.set_known(false);
            return Refusal::none();
        }
        if (request.ticket().epoch() < session->epoch) {
            return stale_epoch(request.ticket().epoch(), session->epoch);
        }
        response.set_known(true);
        *response.mutable_stats() = *session->stats;
        remove(session, "the session was closed", effects);
    }
    effects.perform();
    return Refusal::none();
}

Refusal Worker::touch(const v1::TouchRequest & request, v1::TouchResponse & response) {
    if (auto refusal = tickets_.check_authentic(request.ticket()); refusal.refused()) {
        return refusal;
    }
    std::lock_guard lock(mutex_);
    const auto session = find(request.ticket().session_id());
    response.set_known(session != nullptr);
    // A ticket of an older epoch says nothing about who wants the session now.
    if (session != nullptr && request.ticket().epoch() >= session->epoch) {
        session->last_activity_us = now_us();
        session->gateway_seen_us = session->last_activity_us;
    }
    return Refusal::none();
}

void Worker::remove(const SessionPtr & session, const std::string & why, Effects & effects) {
    if (session->generation != nullptr) {
        refuse(*session, {v1::REFUSAL_CANCELLED, why, 0, 0}, effects);
    }
    discard_inbox(*session, effects);
    session->closed = true;
    effects.garbage.push_back(session);
    // A step that computes keeps the sequence until it ends (commit).
    if (!session->computing) {
        give_up_sequence(session->served, *session);
    }
    sessions_.erase(session->id);
    if (sessions_.empty()) {
        drained_.notify_all();
    }
}

}  // namespace meshnet
