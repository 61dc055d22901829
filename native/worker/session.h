// One Route Session as this hop sees it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "meshnet/v1/shard.pb.h"
#include "worker/generation.h"
#include "worker/link.h"
#include "worker/parts.h"
#include "worker/prefix.h"
#include "worker/sampler.h"
#include "worker/seam_types.h"

namespace meshnet {

// A frame that waits for the engine.
struct QueuedStep {
    v1::StepFrame frame;
    PendingCredit credit;
};

// Guarded by the worker's mutex, except where noted.
struct Session {
    std::string id;
    uint64_t epoch = 0;
    ServedPtr served;  // the layers it uses here

    // This hop's place in the route.
    uint32_t hop_index = 0;
    uint32_t n_hops = 0;
    v1::Peer next;
    v1::Peer head;
    std::shared_ptr<Link> next_link;  // not at the tail
    std::shared_ptr<Link> head_link;  // not at the head: failures, and at the tail tokens, go there
    uint64_t inbound_stream = 0;      // brought the latest frame; 0 is none
    int64_t inbound_lost_us = 0;      // when it broke; 0 while it stands

    uint32_t token_capacity = 0;
    int64_t idle_timeout_us = 0;
    int64_t step_timeout_us = 0;
    int64_t last_activity_us = 0;
    int64_t gateway_seen_us = 0;  // its last call, or the end of a generation it listened to
    bool closed = false;

    // Work.
    std::deque<QueuedStep> inbox;
    std::unique_ptr<Generation> generation;  // head, while one runs
    uint64_t generation_no = 0;              // rises whenever a generation starts or ends
    bool computing = false;
    int64_t ready_since_us = 0;  // head: when the next step could have run at the earliest
    uint64_t last_served = 0;
    std::vector<std::function<void()>> when_idle;  // run when `computing` ends

    // Not the tail: what the first frame of this generation that the next hop needs carries beside its own. The
    // position is the one from which on that hop computes; empty once the frame has gone.
    std::optional<v1::StepFrame> opening;

    // The window towards the next hop (tail: the head).
    uint32_t unacknowledged_frames = 0;
    int64_t waiting_since_us = 0;  // last progress while frames are unacknowledged
    // Head: sampling steps sent whose token has not come back, and how many of these were for a cancelled generation.
    uint32_t samples_outstanding = 0;
    uint32_t samples_to_discard = 0;

    // Set once this epoch is broken here; a re-open clears it.
    std::optional<v1::Failed> failure;
    bool failure_report_pending = false;  // a FailureFrame is on its way to the head

    // What the engine holds. Written only by the engine thread, under the mutex.
    PrefixHistory history;
    // The slot in the engine of `served`; -1 until the first step. While `computing`, the engine thread owns it without
    // the mutex.
    int32_t sequence = -1;
    // Tail. Used only by the engine thread.
    std::unique_ptr<Sampler> sampler;
    uint64_t sampler_epoch = 0;

    // Of this epoch. A step counts where it was begun, though another epoch may have come while it was computed.
    std::shared_ptr<v1::HopStats> stats = std::make_shared<v1::HopStats>();

    bool is_head() const {
        return hop_index == 0;
    }
    bool is_tail() const {
        return hop_index + 1 == n_hops;
    }
    bool window_open() const {
        return n_hops == 1 || unacknowledged_frames < session_window_frames;
    }
    // A failure that cannot be told to the head: the head is to blame for it, and nothing leads there.
    bool cannot_report() const {
        return !is_head() && failure.has_value() && failure->refusal() == v1::REFUSAL_PEER_LOST &&
               failure->hop_index() == 0 && (head_link == nullptr || head_link->lost());
    }
    const std::shared_ptr<Link> & outbound() const {
        return is_tail() ? head_link : next_link;
    }
};

}  // namespace meshnet
