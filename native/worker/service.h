// The gRPC face of a worker: both services of shard.proto, in the callback API, on one port.
#pragma once

#include <memory>
#include <string>

#include "worker/worker.h"

namespace meshnet {

class WorkerServer {
  public:
    // `worker` must outlive the server.
    explicit WorkerServer(Worker & worker);
    ~WorkerServer();

    // Listens on "host:port" (port 0: any free one). False with a reason if that is not possible.
    bool start(const std::string & listen, std::string & problem);
    // "host:port" with the real port.
    const std::string & address() const {
        return address_;
    }
    // Ends calls that run for longer than `grace_ms` more, and waits until all are over. Idempotent. Stop
    // the worker before the server is destroyed.
    void stop(int64_t grace_ms);

  private:
    struct Impl;

    std::unique_ptr<Impl> impl_;
    std::string address_;
};

}  // namespace meshnet
