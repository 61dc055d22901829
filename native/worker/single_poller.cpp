#include "worker/single_poller.h"

#include <grpc/support/cpu.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>

#include "meshnet/v1/shard.grpc.pb.h"
#include "worker/log.h"

namespace meshnet {
namespace {

// As many as gRPC 1.51 starts for callbacks. In a version with fewer, the last call below is not answered.
int n_polling_threads() {
    return static_cast<int>(std::clamp(gpr_cpu_num_cores() / 2, 2U, 16U));
}

// For a call that fails without a look at the network.
constexpr std::chrono::seconds patience{2};

// No address: every call fails at once.
constexpr const char * nowhere = "";

}  // namespace

class SinglePoller::Gate {
  public:
    Gate() {
        const int n_threads = n_polling_threads();
        for (int call = 1; call <= n_threads; ++call) {
            begin(call < n_threads);
            std::unique_lock lock(mutex_);
            if (!changed_.wait_for(lock, patience, [&] { return n_answered_ >= static_cast<size_t>(call); })) {
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
        changed_.wait(lock, [&] { return n_answered_ == calls_.size() && n_waiting_ == 0; });
    }
    Gate(const Gate &) = delete;
    Gate & operator=(const Gate &) = delete;

    int waiting() const {
        std::lock_guard lock(mutex_);
        return n_waiting_;
    }

  private:
    struct Call {
        grpc::ClientContext context;
        v1::StatusRequest request;
        v1::StatusResponse response;
    };

    // A call whose end is told on a network thread, which then `waits` until the gate opens.
    void begin(bool waits) {
        auto & call = calls_.emplace_back();
        stub_->async()->Status(&call.context, &call.request, &call.response, [this, waits](const grpc::Status &) {
            std::unique_lock lock(mutex_);
            ++n_answered_;
            n_waiting_ += waits ? 1 : 0;
            changed_.notify_all();
            changed_.wait(lock, [&] { return !waits || open_; });
            n_waiting_ -= waits ? 1 : 0;
            changed_.notify_all();
        });
    }

    // Ended by ~Gate, and not by a network thread: the last channel to go waits for all of those.
    const std::unique_ptr<v1::Shard::Stub> stub_ =
        v1::Shard::NewStub(grpc::CreateChannel(nowhere, grpc::InsecureChannelCredentials()));
    std::list<Call> calls_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
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
