// The gateway's Generate call: events queue here and are written one after the other.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "worker/worker.h"

namespace meshnet {

class GenerateStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public EventSink {
  public:
    // Starts the generation, or refuses the call. The reactor owns itself until gRPC is done with it.
    static GenerateStream * start(Worker & worker, grpc::CallbackServerContext & context, grpc::ByteBuffer & bytes);

    GenerateStream(Worker & worker, std::string session_id);

    void push(v1::GenerateEvent event, bool last) override;
    void flush() override;
    bool has_room() const override;

  private:
    void OnWriteDone(bool ok) override;
    void OnCancel() override;
    void OnDone() override;

    // Both need the mutex.
    void write_next();
    void finish(const grpc::Status & status);

    Worker & worker_;
    const std::string session_id_;

    mutable std::mutex mutex_;
    std::shared_ptr<GenerateStream> self_;
    std::deque<v1::GenerateEvent> queue_;
    // Size of queue_: the engine thread asks for it while a network thread writes.
    std::atomic<size_t> queued_events_{0};
    grpc::ByteBuffer current_;  // being written
    bool writing_ = false;
    bool ended_ = false;  // the last event is queued or written
    bool cancelled_ = false;
    bool finished_ = false;  // Finish has been called: nothing more may be started
};

}  // namespace meshnet
