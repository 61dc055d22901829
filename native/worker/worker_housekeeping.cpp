// Worker: timeouts, and sessions that nobody wants any more.
#include "worker/clock.h"
#include "worker/convert.h"
#include "worker/log.h"
#include "worker/worker.h"

namespace meshnet {
namespace {

constexpr int64_t tick_interval_ms = 100;
// So late a credit may come though all is well: those of decode frames wait for the tick.
constexpr int64_t credit_grace_us = 2 * tick_interval_ms * 1000;
// A neighbour that sends notices a broken stream by itself; whoever receives waits so long before it blames that one.
constexpr int64_t inbound_grace_us = 1'000'000;

}  // namespace

void Worker::run_housekeeping() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        if (sessions_.empty() && waiting_credits_.empty() && !links_.needs_tick() && !parts_.needs_tick()) {
            housekeeping_wake_.wait(lock);
        } else {
            housekeeping_wake_.wait_for(lock, std::chrono::milliseconds(tick_interval_ms));
        }
        lock.unlock();
        tick(now_us());
        lock.lock();
    }
}

void Worker::tick(int64_t now) {
    links_.tick(now);
    parts_.tick(now);
    Effects effects;
    decltype(waiting_credits_) waiting;
    {
        std::lock_guard lock(mutex_);
        waiting.swap(waiting_credits_);
        const auto sessions = sessions_;
        for (const auto & [id, session] : sessions) {
            tend(session, now, effects);
        }
    }
    effects.perform();
    for (const auto & [stream_id, stream] : waiting) {
        if (const auto sink = stream.lock()) {
            sink->flush();
        }
    }
}

void Worker::tend(const SessionPtr & session, int64_t now, Effects & effects) {
    auto & s = *session;
    const bool waits_for_hop = s.unacknowledged_frames > 0;
    const bool waits_for_token = s.generation != nullptr && s.generation->awaits_sample() && s.n_hops > 1;
    // Where nothing is broken, a hop behind the head cannot tell a gateway that is gone from one that has nothing to
    // say to it; the head can.
    const bool wanted_by_gateway = s.generation != nullptr || !(s.is_head() || s.failure.has_value());
    if (!wanted_by_gateway && now - s.gateway_seen_us > options_.orphan_timeout_ms * 1000) {
        end(session, "nothing was heard of its gateway for " + std::to_string(options_.orphan_timeout_ms) + " ms",
            effects);
    } else if (s.inbound_lost_us > 0 && now - s.inbound_lost_us > inbound_grace_us && !s.failure.has_value()) {
        peer_lost(s, s.hop_index - 1, "its stream broke", effects);
    } else if (waits_for_hop && now - s.waiting_since_us > s.step_timeout_us + credit_grace_us) {
        peer_lost(s, s.is_tail() ? 0 : s.hop_index + 1,
                  "no answer within " + std::to_string(s.step_timeout_us / 1000) + " ms", effects);
    } else if (waits_for_token && !waits_for_hop && !s.computing &&
               now - s.waiting_since_us > s.step_timeout_us + 1'000'000) {
        // The next hop is done with the step; a hop behind it should have reported its own neighbour before.
        peer_lost(s, s.n_hops - 1,
                  "no token came back within " + std::to_string(s.step_timeout_us / 1000 + 1000) + " ms", effects);
    } else if (!waits_for_hop && !waits_for_token && !s.computing && s.inbox.empty() &&
               now - s.last_activity_us > s.idle_timeout_us) {
        const std::string idle_ms = std::to_string(s.idle_timeout_us / 1000);
        log_info("session " + log_name(s.id) + " closed after " + idle_ms + " ms idle");
        remove(session, "the session was idle for too long", effects);
    }
}

// Closes an orphan, here and on the hops behind, which can hear of it from nobody else.
void Worker::end(const SessionPtr & session, const std::string & why, Effects & effects) {
    auto & s = *session;
    log_info("session " + log_name(s.id) + " closed: " + why);
    if (s.next_link != nullptr && !s.next_link->lost()) {
        v1::SeamFrame frame;
        frame.set_session_id(s.id);
        frame.set_epoch(s.epoch);
        frame.mutable_end()->set_message(why);
        SentFrame sent;
        sent.session_id = s.id;
        sent.epoch = s.epoch;
        sent.outside_window = true;
        effects.sends.push_back({s.next_link, std::move(frame), std::move(sent)});
    }
    remove(session, why, effects);
}

}  // namespace meshnet
