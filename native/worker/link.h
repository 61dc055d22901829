// Outbound seam streams: one per neighbour address, shared by all sessions that send there.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "worker/seam_types.h"

namespace meshnet {

class LinkStream;
class LinkPool;

// Called from network threads, without any lock held.
class LinkObserver {
  public:
    virtual ~LinkObserver() = default;
    virtual void on_credit(const CreditReport & report) = 0;
    // The stream broke; whatever was sent may not have arrived. Not called for a link that nobody holds any more.
    virtual void on_link_lost(uint64_t link_id, const std::string & reason) = 0;
};

// A share in a stream. The stream closes (after what is queued) when the last share goes.
class Link {
  public:
    explicit Link(std::shared_ptr<LinkStream> stream);
    ~Link();
    Link(const Link &) = delete;
    Link & operator=(const Link &) = delete;

    uint64_t id() const;
    bool lost() const;
    // Writes `frame` now or, while another is being written, next. Safe from any thread, never blocks on the peer.
    // Frames sent on a lost link are dropped: its loss has been or will be observed.
    void send(v1::SeamFrame frame, SentFrame sent);

  private:
    std::shared_ptr<LinkStream> stream_;
};

class LinkPool {
  public:
    LinkPool(LinkObserver & observer, int64_t connect_timeout_us);
    ~LinkPool();

    // The live link to `address` ("host:port"), or a new one that connects in the background.
    std::shared_ptr<Link> get(const std::string & address);
    // True while there is something for tick() to do.
    bool needs_tick();
    // Gives up on links that take too long to connect; frees those that ended.
    void tick(int64_t now_us);
    // Cancels every stream and waits until none calls the observer any more. Idempotent.
    void shutdown();

  private:
    friend class LinkStream;

    void forget(const LinkStream * stream);
    std::vector<std::shared_ptr<LinkStream>> take_finished();

    LinkObserver & observer_;
    const int64_t connect_timeout_us_;

    std::mutex mutex_;
    std::condition_variable all_done_;
    uint64_t next_id_ = 1;
    bool stopped_ = false;
    std::map<std::string, std::weak_ptr<Link>> links_;
    std::map<const LinkStream *, std::shared_ptr<LinkStream>> streams_;  // until gRPC is done with them
    // Not destroyed where they finish: a channel must not go on one of its own network threads.
    std::vector<std::shared_ptr<LinkStream>> finished_;
};

// True for "host:port", "1.2.3.4:port" and "[v6]:port": never another gRPC target scheme.
bool is_address(const std::string & address);

}  // namespace meshnet
