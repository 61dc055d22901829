#include "worker/link.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <vector>

#include "meshnet/v1/shard.grpc.pb.h"
#include "worker/channel_args.h"
#include "worker/clock.h"

namespace meshnet {

// One Carry call. Operations start from any thread, so it holds the call open (AddHold) until the peer's side ends.
class LinkStream final : public grpc::ClientBidiReactor<v1::SeamFrame, v1::SeamCredits> {
  public:
    LinkStream(LinkPool & pool, uint64_t id, const std::string & address)
        : pool_(pool), id_(id), address_(address), created_us_(now_us()),
          stub_(v1::Seam::NewStub(grpc::CreateCustomChannel("dns:///" + address, grpc::InsecureChannelCredentials(),
                                                            seam_channel_arguments()))) {}

    void start() {
        std::lock_guard lock(mutex_);
        stub_->async()->Carry(&context_, this);
        AddHold();
        StartRead(&credits_);
        StartCall();
    }

    uint64_t id() const {
        return id_;
    }

    bool lost() const {
        std::lock_guard lock(mutex_);
        return lost_;
    }

    void send(v1::SeamFrame frame, SentFrame sent) {
        std::lock_guard lock(mutex_);
        if (lost_ || closing_) {
            return;
        }
        frame.set_frame_no(++last_frame_no_);
        sent.sent_us = now_us();
        unacknowledged_.emplace_back(std::move(sent));
        queue_.push_back(std::move(frame));
        write_next();
    }

    // Nobody sends any more.
    void close() {
        std::lock_guard lock(mutex_);
        closing_ = true;
        write_next();
    }

    void cancel() {
        context_.TryCancel();
    }

    void cancel_if_connecting(int64_t deadline_us) {
        {
            std::lock_guard lock(mutex_);
            if (connected_ || created_us_ > deadline_us) {
                return;
            }
            timed_out_ = true;
        }
        cancel();
    }

  private:
    void OnReadInitialMetadataDone(bool ok) override {
        std::lock_guard lock(mutex_);
        connected_ |= ok;
    }

    void OnWriteDone(bool) override {
        std::lock_guard lock(mutex_);
        writing_ = false;
        write_next();
    }

    void OnReadDone(bool ok) override {
        if (!ok) {
            on_end();
            return;
        }
        std::vector<CreditReport> reports;
        bool known = true;
        {
            std::lock_guard lock(mutex_);
            for (auto credit = credits_.credits().begin(); known && credit != credits_.credits().end(); ++credit) {
                known = take_credit(*credit, reports.emplace_back());
            }
        }
        if (!known) {
            cancel();  // a credit for no frame: the peer is not sane
        } else {
            for (const auto & report : reports) {
                pool_.observer_.on_credit(report);
            }
        }
        StartRead(&credits_);
    }

    void OnDone(const grpc::Status & status) override {
        std::string reason;
        bool observed = false;
        {
            std::lock_guard lock(mutex_);
            observed = !closing_;
            reason = timed_out_    ? "cannot connect to " + address_ + " in time"
                     : !connected_ ? "cannot connect to " + address_ + ": " + status.error_message()
                     : status.ok() ? address_ + " ended the stream"
                                   : "stream to " + address_ + " broke: " + status.error_message();
        }
        if (observed) {
            pool_.observer_.on_link_lost(id_, reason);
        }
        pool_.forget(this);
    }

    // No more reads succeed: the peer's side has ended. Nothing is started after this.
    void on_end() {
        {
            std::lock_guard lock(mutex_);
            lost_ = true;
            queue_.clear();
        }
        RemoveHold();
    }

    // Credits come in any order: frames of different sessions are computed when the scheduler says so.
    bool take_credit(const v1::SeamCredit & credit, CreditReport & report) {
        const uint64_t first_no = last_frame_no_ + 1 - unacknowledged_.size();
        const uint64_t frame_no = credit.frame_no();
        if (frame_no < first_no || frame_no > last_frame_no_ || !unacknowledged_[frame_no - first_no].has_value()) {
            return false;
        }
        auto & entry = unacknowledged_[frame_no - first_no];
        report.frame = std::move(*entry);
        entry.reset();
        while (!unacknowledged_.empty() && !unacknowledged_.front().has_value()) {
            unacknowledged_.pop_front();
        }
        const int64_t round_trip_us = std::max<int64_t>(
            0, now_us() - report.frame.sent_us -
                   static_cast<int64_t>(std::min<uint64_t>(credit.held_us(), std::numeric_limits<int32_t>::max())));
        min_round_trip_us_ = std::min(min_round_trip_us_, round_trip_us);
        report.network_us = round_trip_us - min_round_trip_us_ / 2;
        report.refused = credit.refused();
        return true;
    }

    void write_next() {
        if (writing_ || lost_) {
            return;
        }
        if (!queue_.empty()) {
            writing_ = true;
            current_ = std::move(queue_.front());
            queue_.pop_front();
            StartWrite(&current_);
        } else if (closing_ && !writes_done_) {
            writes_done_ = true;
            StartWritesDone();
        }
    }

    LinkPool & pool_;
    const uint64_t id_;
    const std::string address_;
    const int64_t created_us_;
    const std::unique_ptr<v1::Seam::Stub> stub_;
    grpc::ClientContext context_;

    mutable std::mutex mutex_;
    bool connected_ = false;
    bool timed_out_ = false;
    bool lost_ = false;
    bool closing_ = false;
    bool writing_ = false;
    bool writes_done_ = false;
    uint64_t last_frame_no_ = 0;
    int64_t min_round_trip_us_ = std::numeric_limits<int64_t>::max();
    std::deque<v1::SeamFrame> queue_;                      // bounded by the sessions' windows
    v1::SeamFrame current_;                                // being written
    v1::SeamCredits credits_;                              // being read
    std::deque<std::optional<SentFrame>> unacknowledged_;  // frame numbers up to last_frame_no_
};

Link::Link(std::shared_ptr<LinkStream> stream) : stream_(std::move(stream)) {}

Link::~Link() {
    stream_->close();
}

uint64_t Link::id() const {
    return stream_->id();
}

bool Link::lost() const {
    return stream_->lost();
}

void Link::send(v1::SeamFrame frame, SentFrame sent) {
    stream_->send(std::move(frame), std::move(sent));
}

LinkPool::LinkPool(LinkObserver & observer, int64_t connect_timeout_us)
    : observer_(observer), connect_timeout_us_(connect_timeout_us) {}

LinkPool::~LinkPool() {
    shutdown();
}

std::shared_ptr<Link> LinkPool::get(const std::string & address) {
    std::shared_ptr<LinkStream> stream;
    std::shared_ptr<Link> link;
    {
        std::lock_guard lock(mutex_);
        if (link = links_[address].lock(); link != nullptr && !link->lost()) {
            return link;
        }
        stream = std::make_shared<LinkStream>(*this, next_id_++, address);
        link = std::make_shared<Link>(stream);
        links_[address] = link;
        streams_[stream.get()] = stream;
        if (!stopped_) {
            stream->start();
            return link;
        }
        streams_.erase(stream.get());
    }
    return link;
}

bool LinkPool::needs_tick() {
    std::lock_guard lock(mutex_);
    return !streams_.empty() || !finished_.empty();
}

void LinkPool::tick(int64_t now_us) {
    take_finished();
    std::vector<std::shared_ptr<LinkStream>> streams;
    {
        std::lock_guard lock(mutex_);
        for (const auto & [key, stream] : streams_) {
            streams.push_back(stream);
        }
        for (auto it = links_.begin(); it != links_.end();) {
            it = it->second.expired() ? links_.erase(it) : std::next(it);
        }
    }
    for (const auto & stream : streams) {
        stream->cancel_if_connecting(now_us - connect_timeout_us_);
    }
}

void LinkPool::shutdown() {
    std::unique_lock lock(mutex_);
    stopped_ = true;
    for (const auto & [key, stream] : streams_) {
        stream->cancel();
    }
    all_done_.wait(lock, [&] { return streams_.empty(); });
    lock.unlock();
    take_finished();
}

void LinkPool::forget(const LinkStream * stream) {
    std::lock_guard lock(mutex_);
    if (const auto it = streams_.find(stream); it != streams_.end()) {
        finished_.push_back(std::move(it->second));
        streams_.erase(it);
    }
    if (streams_.empty()) {
        all_done_.notify_all();
    }
}

std::vector<std::shared_ptr<LinkStream>> LinkPool::take_finished() {
    std::lock_guard lock(mutex_);
    return std::exchange(finished_, {});
}

bool is_address(const std::string & address) {
    const size_t colon = address.rfind(':');
    if (colon == std::string::npos || colon == 0 || address.size() > 260 || address.size() - colon < 2 ||
        address.size() - colon > 6 || address.find_first_not_of("0123456789", colon + 1) != std::string::npos) {
        return false;
    }
    const std::string host = address.substr(0, colon);
    if (host.front() == '[') {
        return host.size() > 2 && host.back() == ']' &&
               host.find_first_not_of("0123456789abcdefABCDEF:.", 1) == host.size() - 1;
    }
    return host.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
           std::string::npos;
}

}  // namespace meshnet
