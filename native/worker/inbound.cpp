#include "worker/inbound.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "meshnet/v1/shard.grpc.pb.h"
#include "worker/clock.h"
#include "worker/message.h"

namespace meshnet {
namespace {

// A peer that does not read its credits is not read from either.
constexpr size_t max_queued_credits = 256;

// Credits that may wait: fewer than a session's window, so that none ever runs out for it.
constexpr size_t max_waiting_credits = session_window_frames - 1;

class InboundStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>, public CreditSink {
  public:
    explicit InboundStream(FrameReceiver & receiver) : receiver_(receiver), id_(next_id.fetch_add(1)) {}

    uint64_t id() const override {
        return id_;
    }

    void start(std::shared_ptr<InboundStream> self) {
        {
            std::lock_guard lock(mutex_);
            self_ = std::move(self);
        }
        StartSendInitialMetadata();  // tells the sender that the stream stands
        StartRead(&message_);
    }

    void give(uint64_t frame_no, int64_t arrived_us, v1::Refusal refused, bool may_wait) override {
        v1::SeamCredit credit;
        credit.set_frame_no(frame_no);
        credit.set_refused(refused);
        std::lock_guard lock(mutex_);
        if (!finished_) {
            queue_.push_back({std::move(credit), arrived_us});
            expected_ -= may_wait ? 1 : 0;
            hurry_ |= !may_wait || queue_.size() >= max_waiting_credits;
            write_next();
        }
    }

    void expect() override {
        std::lock_guard lock(mutex_);
        ++expected_;
    }

    void flush() override {
        std::lock_guard lock(mutex_);
        hurry_ = true;
        write_next();
    }

  private:
    struct QueuedCredit {
        v1::SeamCredit credit;
        int64_t arrived_us;
    };

    void OnReadDone(bool ok) override {
        if (!ok) {
            finish(grpc::Status::OK);
            return;
        }
        const int64_t arrived_us = now_us();
        const uint64_t bytes = message_.Length();
        v1::SeamFrame frame;
        Refusal refusal;
        try {
            refusal = read_message(message_, frame);
            message_.Clear();
            if (!refusal.refused()) {
                PendingCredit credit(self(), frame.frame_no(), arrived_us);
                refusal = receiver_.on_frame(std::move(credit), std::move(frame), bytes);
            }
        } catch (const std::exception & error) {
            refusal = {v1::REFUSAL_ENGINE_FAILURE, std::string("cannot take a frame: ") + error.what(), 0, 0};
        }
        if (refusal.refused()) {
            lose();
            finish({grpc::StatusCode::INVALID_ARGUMENT, refusal.message});
            return;
        }
        std::lock_guard lock(mutex_);
        if (queue_.size() >= max_queued_credits) {
            read_paused_ = true;
        } else if (!finished_) {
            StartRead(&message_);
        }
    }

    void OnWriteDone(bool ok) override {
        std::lock_guard lock(mutex_);
        writing_ = false;
        if (!ok || finished_) {
            return;
        }
        write_next();
        if (read_paused_ && queue_.size() < max_queued_credits) {
            read_paused_ = false;
            StartRead(&message_);
        }
    }

    void OnCancel() override {
        lose();
        finish(grpc::Status::CANCELLED);
    }

    void OnDone() override {
        std::shared_ptr<InboundStream> last;  // destroyed after the lock is released
        std::lock_guard lock(mutex_);
        finished_ = true;
        last = std::move(self_);
    }

    std::shared_ptr<InboundStream> self() {
        std::lock_guard lock(mutex_);
        return self_;
    }

    void lose() {
        if (self() != nullptr) {
            receiver_.on_inbound_lost(id_);
        }
    }

    void finish(const grpc::Status & status) {
        {
            std::lock_guard lock(mutex_);
            if (finished_) {
                return;
            }
            finished_ = true;
            queue_.clear();
        }
        Finish(status);
    }

    void write_next() {
        if (writing_ || finished_ || !hurry_ || queue_.empty()) {
            return;
        }
        v1::SeamCredits credits;
        const int64_t now = now_us();
        for (auto & next : queue_) {
            next.credit.set_held_us(static_cast<uint64_t>(now - next.arrived_us));
            credits.add_credits()->Swap(&next.credit);
        }
        queue_.clear();
        hurry_ = hurry_ && expected_ > 0;  // else a flush would miss what was announced before it
        writing_ = true;
        current_ = to_bytes(credits);
        StartWrite(&current_);
    }

    static std::atomic<uint64_t> next_id;

    FrameReceiver & receiver_;
    const uint64_t id_;
    grpc::ByteBuffer message_;  // being read

    std::mutex mutex_;
    std::shared_ptr<InboundStream> self_;
    bool finished_ = false;
    bool writing_ = false;
    bool read_paused_ = false;
    bool hurry_ = false;   // what is queued is to be written now
    size_t expected_ = 0;  // credits that may wait and are not given yet
    std::vector<QueuedCredit> queue_;
    grpc::ByteBuffer current_;  // being written
};

std::atomic<uint64_t> InboundStream::next_id{1};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> * start_inbound(FrameReceiver & receiver) {
    auto stream = std::make_shared<InboundStream>(receiver);
    stream->start(stream);
    return stream.get();
}

}  // namespace meshnet
