// What the seam's two ends and the worker between them pass to one another.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "meshnet/v1/shard.pb.h"

namespace meshnet {

// Frames of one session that a receiver has not given back credit for: one is computed, the others keep the hop busy
// while the next is on its way. A sender keeps to it; a receiver refuses more (FLOW_CONTROL).
inline constexpr uint32_t session_window_frames = 4;

// Where credits for received frames go: the stream that brought them.
class CreditSink {
  public:
    virtual ~CreditSink() = default;
    // Unique in the process.
    virtual uint64_t id() const = 0;
    // Safe from any thread; does nothing once the stream is gone. A credit that `may_wait` has been announced by
    // expect(). It goes with the next one that may not, or when a few have come together, or with flush(): every
    // message takes time from those that compute.
    virtual void give(uint64_t frame_no, int64_t arrived_us, v1::Refusal refused, bool may_wait) = 0;
    virtual void expect() = 0;
    // Writes what waits, and what is expected as soon as it is given.
    virtual void flush() = 0;
};

// The duty to give credit for one frame, exactly once: at the latest when it is destroyed.
class PendingCredit {
  public:
    PendingCredit() = default;
    PendingCredit(std::shared_ptr<CreditSink> sink, uint64_t frame_no, int64_t arrived_us)
        : sink_(std::move(sink)), frame_no_(frame_no), arrived_us_(arrived_us) {}
    PendingCredit(PendingCredit && other) noexcept = default;
    PendingCredit & operator=(PendingCredit && other) noexcept {
        give();
        sink_ = std::move(other.sink_);
        frame_no_ = other.frame_no_;
        arrived_us_ = other.arrived_us_;
        refused_ = other.refused_;
        may_wait_ = other.may_wait_;
        return *this;
    }
    ~PendingCredit() {
        give();
    }

    // What the credit will say of the frame.
    void refuse(v1::Refusal refused) {
        refused_ = refused;
    }
    // Nobody waits for it. Its stream has to be flushed after this.
    void let_wait() {
        if (sink_ != nullptr && !may_wait_) {
            may_wait_ = true;
            sink_->expect();
        }
    }
    void give() {
        if (auto sink = std::exchange(sink_, nullptr)) {
            sink->give(frame_no_, arrived_us_, refused_, may_wait_);
        }
    }
    int64_t arrived_us() const {
        return arrived_us_;
    }
    // Of the stream that brought the frame; 0 once given.
    uint64_t stream_id() const {
        return sink_ == nullptr ? 0 : sink_->id();
    }
    const std::shared_ptr<CreditSink> & sink() const {
        return sink_;
    }

  private:
    std::shared_ptr<CreditSink> sink_;
    uint64_t frame_no_ = 0;
    int64_t arrived_us_ = 0;
    v1::Refusal refused_ = v1::REFUSAL_UNSPECIFIED;
    bool may_wait_ = false;
};

// What a sender remembers of a frame until its credit comes back.
struct SentFrame {
    std::string session_id;
    uint64_t epoch = 0;
    bool outside_window = false;  // a FailureFrame or an EndFrame
    uint32_t prefill_tokens = 0;  // prompt tokens in it
    uint64_t generation_no = 0;   // head: see Session
    int64_t sent_us = 0;
};

struct CreditReport {
    SentFrame frame;
    int64_t network_us = 0;  // see HopStats.network_us
    v1::Refusal refused = v1::REFUSAL_UNSPECIFIED;
};

// Where the events of one generation go: the gateway's call.
class EventSink {
  public:
    virtual ~EventSink() = default;
    // Queues an event; after the `last` one further events are ignored. Never blocks.
    virtual void push(v1::GenerateEvent event, bool last) = 0;
    // Starts writing what is queued.
    virtual void flush() = 0;
    // False while the reader is too far behind for more tokens.
    virtual bool has_room() const = 0;
};

}  // namespace meshnet
