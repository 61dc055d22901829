// The parts of a worker's range that sessions use instead of the whole: an engine each over the same file, so that
// weights are in memory once as far as they are used as they are in the file. A part is loaded when a session first
// asks for it, by a thread of its own, and dropped when no session has used it for a while.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/shard_engine.h"
#include "worker/frame_rules.h"
#include "worker/refusal.h"
#include "worker/task_thread.h"

namespace meshnet {

// Layers that this worker computes: its whole range, or a part of it. Whoever holds it keeps it loaded.
struct Served {
    explicit Served(std::unique_ptr<ShardEngine> loaded);

    const std::unique_ptr<ShardEngine> engine;
    const EngineDescription & model;
    const FrameRules rules;
};

using ServedPtr = std::shared_ptr<const Served>;

// Loads the engine of some layers of the worker's range, configured as the whole's.
using LoadPart = std::function<Status(LayerRange layers, std::unique_ptr<ShardEngine> & engine)>;

struct PartOptions {
    uint32_t max_parts = 2;       // loaded or being loaded at once; 0: the range is served as a whole
    int64_t patience_ms = 4'000;  // how long who asks waits for a part that is being loaded; gateways give up after 5 s
    int64_t linger_ms = 60'000;   // how long a part stays that no session uses
};

class Parts {
  public:
    // Called once, with a refusal or the part; never under a lock of this class.
    using Answer = std::function<void(const Refusal & refusal, ServedPtr part)>;

    // Without `load` the range is served as a whole. `whole` must outlive this. `free_bytes` tells how much memory is
    // free; by default the system does.
    Parts(const EngineDescription & whole, LoadPart load, PartOptions options,
          std::function<uint64_t()> free_bytes = {});
    // Waits for the part that is being loaded.
    ~Parts();

    bool enabled() const {
        return load_ != nullptr && options_.max_parts > 0;
    }
    // Whether layers [start, end) are the range, or a part that it can be cut into.
    Refusal check(uint32_t start, uint32_t end) const;

    // Answers at once if the part (check() must have passed) is there or cannot be had, else when it is loaded or
    // patience ends. The part is then loaded all the same, and there for who asks again.
    void get(LayerRange layers, int64_t now_us, Answer answer);

    // Whether tick() has anything to do, now or later.
    bool needs_tick() const;
    // Ends what was waited for too long, and drops what was unused for too long.
    void tick(int64_t now_us);
    // Refuses everybody who waits, and loads nothing more.
    void stop();

  private:
    struct Waiting {
        Answer answer;
        int64_t until_us;
    };
    struct Part {
        LayerRange layers;
        ServedPtr served;  // null while it is loaded
        std::vector<Waiting> waiting;
        int64_t last_used_us = 0;
    };

    // All three need the mutex.
    Part * find(LayerRange layers);
    static bool is_used(const Part & part);
    Refusal make_room(ServedPtr & dropped);

    // The loading thread.
    void load(LayerRange layers);
    Status make(LayerRange layers, std::unique_ptr<ShardEngine> & engine) const;

    const EngineDescription & whole_;
    const LoadPart load_;
    const PartOptions options_;
    const std::function<uint64_t()> free_bytes_;

    mutable std::mutex mutex_;
    std::vector<Part> parts_;
    bool stopping_ = false;
    std::unique_ptr<TaskThread> loader_;  // from the first part on
};

}  // namespace meshnet
