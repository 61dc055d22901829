#include "worker/single_poller.h"

#include <grpc/support/cpu.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/version_info.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>

#include "meshnet/v1/shard.grpc.pb.h"
#include "worker/log.h"

namespace meshnet {
namespace {

// All threads that gRPC 1.51 starts for callbacks, but one. How other versions call back has not been looked at.
size_t n_spare_threads() {
    constexpr bool known = GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51;
    return known ? std::clamp(gpr_cpu_num_cores() / 2, 2U, 16U) - 1 : 0;
}

// For a call that fails without a look at the network.
constexpr std::chrono::seconds patience{2};

// A thread that had nothing to do for a second sleeps for a tenth of one, and hears nothing meanwhile: not this one.
constexpr std::chrono::milliseconds nudge_interval{500};

}  // namespace

class SinglePoller::Gate {
  public:
    Gate() {
        const size_t n_parked = n_spare_threads();
        std::unique_lock lock(mutex_);
        for (size_t i = 0; i <= n_parked; ++i) {
            const bool parks = i < n_parked;
            begin(lock, parks ? parked_.emplace_back() : nudge_, parks);
            if (!changed_.wait_for(lock, patience, [&] { return n_answered_ == n_begun_; })) {
                log_warning("no network thread can be spared");
                open_ = true;
                changed_.notify_all();
                return;
            }
        }
    }
    ~Gate() {
        std::unique_lock lock(mutex_);
        open_ = true;
        changed_.notify_all();
        changed_.wait(lock, [&] { return n_answered_ == n_begun_ && n_waiting_ == 0; });
    }
    Gate(const Gate &) = delete;
    Gate & operator=(const Gate &) = delete;

    int waiting() const {
        std::lock_guard lock(mutex_);
        return n_waiting_;
    }

  private:
    // Owned by the gate, and not by its callback: the last channel to go waits for all network threads, so it must not
    // go on one of them.
    struct Call {
        std::unique_ptr<grpc::ClientContext> context;
        v1::StatusRequest request;
        v1::StatusResponse response;
    };

    // A call whose end is told on a network thread, which then `parks`.
    void begin(std::unique_lock<std::mutex> & lock, Call & call, bool parks) {
        ++n_begun_;
        lock.unlock();
        call.context = std::make_unique<grpc::ClientContext>();
        stub_->async()->Status(call.context.get(), &call.request, &call.response, [this, parks](const grpc::Status &) {
            std::unique_lock lock(mutex_);
            ++n_answered_;
            changed_.notify_all();
            if (parks) {
                park(lock);
            }
        });
        lock.lock();
    }

    // Until the gate opens. Meanwhile the thread that polls is given something to do now and then.
    void park(std::unique_lock<std::mutex> & lock) {
        ++n_waiting_;
        while (!open_) {
            const bool idle = changed_.wait_for(lock, nudge_interval) == std::cv_status::timeout;
            if (idle && !open_ && n_waiting_ == static_cast<int>(parked_.size()) && n_answered_ == n_begun_) {
                begin(lock, nudge_, false);
            }
        }
        --n_waiting_;
        changed_.notify_all();
    }

    // Without credentials there is no channel, and every call fails at once, without a word in the log.
    const std::unique_ptr<v1::Shard::Stub> stub_ = v1::Shard::NewStub(grpc::CreateChannel("", nullptr));
    std::list<Call> parked_;
    Call nudge_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    size_t n_begun_ = 0;
    size_t n_answered_ = 0;
    int n_waiting_ = 0;
    bool open_ = false;
};

SinglePoller::SinglePoller() {
    static std::mutex mutex;
    static std::weak_ptr<Gate> shared;
    std::lock_guard lock(mutex);
    gate_ = shared.lock();
    if (gate_ == nullptr) {
        gate_ = std::make_shared<Gate>();
        shared = gate_;
    }
}

int SinglePoller::waiting() const {
    return gate_->waiting();
}

}  // namespace meshnet
