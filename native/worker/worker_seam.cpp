// Worker: frames that arrive, credits, and failures.
#include "worker/clock.h"
#include "worker/convert.h"
#include "worker/log.h"
#include "worker/worker.h"

namespace meshnet {

Refusal Worker::on_frame(PendingCredit credit, v1::SeamFrame frame, uint64_t bytes) {
    if (frame.session_id().size() != session_id_bytes) {
        return bad_request("a seam frame must name its session by 16 bytes");
    }
    ServedPtr served = whole_;
    Refusal malformed;
    if (frame.body_case() == v1::SeamFrame::kStep) {
        served = layers_of(frame.session_id());
        malformed = served->rules.check_step(frame.step());
    } else if (frame.body_case() == v1::SeamFrame::BODY_NOT_SET) {
        malformed = bad_request("the seam frame has no body that this worker knows");
    }
    Effects effects;
    v1::Refusal answer = v1::REFUSAL_UNSPECIFIED;
    {
        std::lock_guard lock(mutex_);
        const auto session = find(frame.session_id());
        if (session == nullptr || frame.epoch() > session->epoch) {
            answer = v1::REFUSAL_UNKNOWN_SESSION;
            totals_.set_refused_frames(totals_.refused_frames() + 1);
        } else if (frame.epoch() < session->epoch) {
            totals_.set_refused_frames(totals_.refused_frames() + 1);
        } else {
            auto & s = *session;
            s.inbound_stream = credit.stream_id();
            s.inbound_lost_us = 0;
            s.last_activity_us = credit.arrived_us();
            s.stats->set_bytes_in(s.stats->bytes_in() + bytes);
            s.stats->set_frames_in(s.stats->frames_in() + 1);
            switch (frame.body_case()) {
            case v1::SeamFrame::kSampled:
                take_sampled(s, frame.sampled(), effects);
                if (s.generation != nullptr && !s.failure.has_value()) {
                    let_wait(credit);
                }
                break;
            case v1::SeamFrame::kFailure:
                take_failure(s, frame.failure(), effects);
                break;
            case v1::SeamFrame::kEnd:
                take_end(session, frame.end(), effects);
                break;
            default:
                if (frame.has_step() && s.served != served) {
                    malformed = s.served->rules.check_step(frame.step());  // re-opened for other layers meanwhile
                }
                take_step(s, std::move(*frame.mutable_step()), std::move(credit), malformed, effects);
            }
        }
    }
    effects.perform();
    credit.refuse(answer);
    credit.give();
    return Refusal::none();
}

// The layers that a session uses here; the whole range if there is no such session.
ServedPtr Worker::layers_of(const std::string & session_id) const {
    std::lock_guard lock(mutex_);
    const auto session = find(session_id);
    return session == nullptr ? whole_ : session->served;
}

void Worker::take_step(Session & session, v1::StepFrame frame, PendingCredit credit, const Refusal & malformed,
                       Effects & effects) {
    if (session.failure.has_value()) {
        // The sender does not know yet; the head may have missed it.
        if (session.cannot_report()) {
            credit.refuse(v1::REFUSAL_PEER_LOST);
        }
        effects.credits.push_back(std::move(credit));
        report_failure(session, effects);
        return;
    }
    Refusal refusal = malformed;
    if (!refusal.refused() && session.is_head()) {
        refusal = bad_request("a step frame came to the head");
    }
    if (!refusal.refused() && session.inbox.size() + (session.computing ? 1 : 0) >= session_window_frames) {
        refusal = {v1::REFUSAL_FLOW_CONTROL, "more frames than the session's window", session_window_frames + 1,
                   session_window_frames};
    }
    if (refusal.refused()) {
        totals_.set_refused_frames(totals_.refused_frames() + 1);
        effects.credits.push_back(std::move(credit));
        refuse(session, refusal, effects);
        return;
    }
    session.inbox.push_back({std::move(frame), std::move(credit)});
    engine_wake_.notify_one();
}

void Worker::take_sampled(Session & session, const v1::SampledFrame & frame, Effects & effects) {
    if (session.failure.has_value()) {
        return;
    }
    Refusal refusal;
    if (!session.is_head() || session.samples_outstanding == 0) {
        refusal = bad_request("a sampled token came that was not asked for");
    }
    for (const auto & token : frame.tokens()) {
        if (!refusal.refused()) {
            refusal = rules_.check_token(token.token());
        }
    }
    if (refusal.refused()) {
        totals_.set_refused_frames(totals_.refused_frames() + 1);
        refuse(session, refusal, effects);
        return;
    }
    sampled(session, frame, effects);
}

void Worker::sampled(Session & session, const v1::SampledFrame & frame, Effects & effects) {
    --session.samples_outstanding;
    if (session.samples_to_discard > 0) {
        --session.samples_to_discard;
        return;
    }
    if (session.generation == nullptr) {
        return;
    }
    auto & generation = *session.generation;
    const bool is_eog = frame.tokens_size() == 1 && vocabulary_.is_eog(static_cast<int32_t>(frame.tokens(0).token()));
    std::string problem;
    if (!generation.on_sampled(frame, is_eog, now_us(), problem)) {
        refuse(session, bad_request(problem), effects);
        return;
    }
    if (generation.finished()) {
        end_generation(session, effects);
    } else {
        effects.flushes.push_back(generation.shared_sink());
        session.ready_since_us = now_us();
        engine_wake_.notify_one();
    }
}

void Worker::take_failure(Session & session, const v1::FailureFrame & frame, Effects & effects) {
    if (!session.is_head() || frame.hop_index() >= session.n_hops) {
        totals_.set_refused_frames(totals_.refused_frames() + 1);
        return;
    }
    v1::Failed failure;
    failure.set_refusal(v1::Refusal_IsValid(frame.refusal()) && frame.refusal() != v1::REFUSAL_UNSPECIFIED
                            ? frame.refusal()
                            : v1::REFUSAL_ENGINE_FAILURE);
    failure.set_message(printable(frame.message()));
    failure.set_hop_index(frame.hop_index());
    failure.set_shard_id(printable(frame.shard_id()));
    fail(session, std::move(failure), effects);
}

void Worker::take_end(const SessionPtr & session, const v1::EndFrame & frame, Effects & effects) {
    if (session->is_head()) {
        totals_.set_refused_frames(totals_.refused_frames() + 1);
        refuse(*session, bad_request("an end frame came to the head"), effects);
        return;
    }
    end(session, printable(frame.message()), effects);
}

void Worker::refuse(Session & session, const Refusal & refusal, Effects & effects) {
    v1::Failed failure;
    failure.set_refusal(refusal.code);
    failure.set_message(refusal.message);
    failure.set_hop_index(session.hop_index);
    failure.set_shard_id(options_.shard_id);
    fail(session, std::move(failure), effects);
}

void Worker::peer_lost(Session & session, uint32_t hop_index, const std::string & reason, Effects & effects) {
    v1::Failed failure;
    failure.set_refusal(v1::REFUSAL_PEER_LOST);
    failure.set_hop_index(hop_index);
    if (hop_index == 0 && session.hop_index != 0) {
        failure.set_shard_id(session.head.shard_id());
    } else if (hop_index == session.hop_index + 1) {
        failure.set_shard_id(session.next.shard_id());
    }
    failure.set_message("hop " + std::to_string(hop_index) + " (" +
                        (failure.shard_id().empty() ? "shard unknown here" : printable(failure.shard_id())) +
                        ") is lost: " + printable(reason));
    fail(session, std::move(failure), effects);
}

void Worker::fail(Session & session, v1::Failed failure, Effects & effects) {
    if (session.failure.has_value()) {
        return;  // the first cause counts
    }
    log_warning("session " + log_name(session.id) + " epoch " + std::to_string(session.epoch) + ": " +
                v1::Refusal_Name(failure.refusal()) + " at hop " + std::to_string(failure.hop_index()) + ": " +
                failure.message());
    session.failure = std::move(failure);
    discard_inbox(session, effects);
    session.unacknowledged_frames = 0;
    if (session.generation != nullptr) {
        session.generation->fail(*session.failure);
        end_generation(session, effects);
    }
    report_failure(session, effects);
}

void Worker::report_failure(Session & session, Effects & effects) {
    if (session.is_head() || session.cannot_report() || session.failure_report_pending || stopping_) {
        return;
    }
    if (session.head_link == nullptr || session.head_link->lost()) {
        session.head_link = links_.get(session.head.address());
    }
    v1::SeamFrame frame;
    auto * body = frame.mutable_failure();
    body->set_refusal(session.failure->refusal());
    body->set_message(session.failure->message());
    body->set_hop_index(session.failure->hop_index());
    body->set_shard_id(session.failure->shard_id());
    frame.set_session_id(session.id);
    frame.set_epoch(session.epoch);
    session.failure_report_pending = true;
    SentFrame sent;
    sent.session_id = session.id;
    sent.epoch = session.epoch;
    sent.outside_window = true;
    effects.sends.push_back({session.head_link, std::move(frame), std::move(sent)});
}

void Worker::end_generation(Session & session, Effects & effects) {
    effects.flushes.push_back(session.generation->shared_sink());
    session.generation.reset();
    ++session.generation_no;
    session.samples_to_discard = session.samples_outstanding;
    session.last_activity_us = now_us();
    // Even if its call was cancelled: it may be about to open the session again.
    session.gateway_seen_us = session.last_activity_us;
}

void Worker::discard_inbox(Session & session, Effects & effects) {
    for (auto & queued : session.inbox) {
        if (session.cannot_report()) {
            queued.credit.refuse(v1::REFUSAL_PEER_LOST);
        }
        effects.credits.push_back(std::move(queued.credit));
    }
    session.inbox.clear();
}

// Of a frame that came while all is well: the next one comes soon, and its credit with this one.
void Worker::let_wait(PendingCredit & credit) {
    if (credit.sink() != nullptr) {
        credit.let_wait();  // before the stream is known to the housekeeping that flushes it
        waiting_credits_[credit.stream_id()] = credit.sink();
    }
}

void Worker::send(Session & session, v1::SeamFrame frame, SentFrame sent, Effects & effects) {
    frame.set_session_id(session.id);
    frame.set_epoch(session.epoch);
    session.stats->set_bytes_out(session.stats->bytes_out() + frame.ByteSizeLong());
    session.stats->set_frames_out(session.stats->frames_out() + 1);
    if (session.unacknowledged_frames++ == 0) {
        session.waiting_since_us = now_us();
    }
    sent.session_id = session.id;
    sent.epoch = session.epoch;
    effects.sends.push_back({session.outbound(), std::move(frame), std::move(sent)});
}

void Worker::on_credit(const CreditReport & report) {
    Effects effects;
    {
        std::lock_guard lock(mutex_);
        const auto session = find(report.frame.session_id);
        if (session == nullptr || session->epoch != report.frame.epoch) {
            return;
        }
        auto & s = *session;
        if (report.frame.outside_window) {
            s.failure_report_pending = false;
            return;
        }
        s.stats->set_network_us(s.stats->network_us() + static_cast<uint64_t>(report.network_us));
        s.last_activity_us = now_us();
        s.waiting_since_us = s.last_activity_us;
        if (s.failure.has_value()) {
            return;
        }
        if (report.refused != v1::REFUSAL_UNSPECIFIED) {
            v1::Failed failure;
            failure.set_refusal(v1::Refusal_IsValid(report.refused) ? report.refused : v1::REFUSAL_UNKNOWN_SESSION);
            failure.set_hop_index(s.is_tail() ? 0 : s.hop_index + 1);
            failure.set_shard_id(s.is_tail() ? s.head.shard_id() : s.next.shard_id());
            failure.set_message(
                "hop " + std::to_string(failure.hop_index()) +
                (report.refused == v1::REFUSAL_PEER_LOST ? " cannot reach the head" : " does not have this session"));
            fail(s, std::move(failure), effects);
        } else {
            const bool was_full = !s.window_open();
            s.unacknowledged_frames -= s.unacknowledged_frames > 0 ? 1 : 0;
            if (s.generation != nullptr && report.frame.generation_no == s.generation_no &&
                report.frame.prefill_tokens > 0) {
                s.generation->on_prefill_done(report.frame.prefill_tokens);
                effects.flushes.push_back(s.generation->shared_sink());
            }
            if (was_full) {
                s.ready_since_us = s.last_activity_us;
                engine_wake_.notify_one();
            }
        }
    }
    effects.perform();
}

void Worker::on_link_lost(uint64_t link_id, const std::string & reason) {
    Effects effects;
    {
        std::lock_guard lock(mutex_);
        for (const auto & [id, session] : sessions_) {
            auto & s = *session;
            if (s.next_link != nullptr && s.next_link->id() == link_id) {
                peer_lost(s, s.hop_index + 1, reason, effects);
            } else if (s.head_link != nullptr && s.head_link->id() == link_id) {
                s.failure_report_pending = false;
                peer_lost(s, 0, reason, effects);
            }
        }
    }
    effects.perform();
}

void Worker::on_inbound_lost(uint64_t stream_id) {
    Effects effects;
    {
        std::lock_guard lock(mutex_);
        for (const auto & [id, session] : sessions_) {
            auto & s = *session;
            if (s.inbound_stream == stream_id) {
                s.inbound_stream = 0;
                if (s.is_head()) {
                    peer_lost(s, s.n_hops - 1, "its stream broke", effects);
                } else {
                    // A hop whose way here broke is not lost: it notices by itself, and knows better who is to blame.
                    s.inbound_lost_us = now_us();
                }
            }
        }
    }
    effects.perform();
}

}  // namespace meshnet
