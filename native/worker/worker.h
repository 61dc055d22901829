// A shard worker: sessions, the engine thread, and the seam to its neighbours.
//
// State is guarded by one mutex that is held for microseconds only: never while the engine computes, never while
// anything is written to the network. The engine thread takes ready steps, computes them, and sends what comes out.
// Network threads bring frames, credits and calls. Housekeeping is one more thread, for timeouts.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/shard_engine.h"
#include "meshnet/v1/shard.pb.h"
#include "worker/effects.h"
#include "worker/frame_rules.h"
#include "worker/inbound.h"
#include "worker/link.h"
#include "worker/parts.h"
#include "worker/refusal.h"
#include "worker/scheduler.h"
#include "worker/session.h"
#include "worker/ticket.h"

namespace meshnet {

struct WorkerOptions {
    std::string shard_id;
    std::string model_name;  // empty: the engine's
    std::string artifact_digest;
    std::string ticket_key;      // empty: any ticket is accepted
    uint32_t chunk_tokens = 64;  // prefill chunk unless a request says otherwise
    int64_t idle_timeout_ms = 120'000;
    // A session whose gateway has not been heard of for so long is closed, if it is broken here or nothing runs at its
    // head.
    int64_t orphan_timeout_ms = 10'000;
    int64_t step_timeout_ms = 30'000;
    int64_t connect_timeout_ms = 2'000;
    PartOptions parts;
};

class Worker final : public LinkObserver, public FrameReceiver {
  public:
    // Without `load_part` every session uses the engine's whole range.
    Worker(std::unique_ptr<ShardEngine> engine, WorkerOptions options, LoadPart load_part = {});
    ~Worker() override;

    // ---- calls (any thread; refusals as in shard.proto)
    const v1::DescribeResponse & description() const {
        return description_;
    }
    v1::StatusResponse status() const;
    Refusal tokenize(const v1::TokenizeRequest & request, v1::TokenizeResponse & response) const;
    Refusal detokenize(const v1::DetokenizeRequest & request, v1::DetokenizeResponse & response) const;

    using OpenReply = std::function<void(const Refusal &, const v1::OpenResponse &)>;
    // Replies at once, or, if a session is re-opened while one of its steps is computed, when that step ends, or, if it
    // asks for a part of the range, when that is loaded (see Parts::get).
    void open(const v1::OpenRequest & request, OpenReply reply);
    // On success the generation's events go to `sink` until the last one.
    Refusal generate(const v1::GenerateRequest & request, std::shared_ptr<EventSink> sink);
    // Stops the generation whose events go to `sink`, if it still runs. Emits nothing.
    void cancel(const std::string & session_id, const EventSink * sink);
    Refusal close(const v1::CloseRequest & request, v1::CloseResponse & response);
    Refusal touch(const v1::TouchRequest & request, v1::TouchResponse & response);
    // A sink has room again.
    void wake();

    // ---- life
    // Refuses every further Open.
    void drain();
    // Waits until no session is open; false at the timeout.
    bool wait_drained(int64_t timeout_ms);
    // Ends every session, both threads and all links. Idempotent. Stop the server first.
    void stop();

    // Closes idle sessions and orphans, and fails those whose next hop does not answer. Housekeeping calls it; public
    // for tests.
    void tick(int64_t now_us);

    // ---- seam (network threads)
    Refusal on_frame(PendingCredit credit, v1::SeamFrame frame, uint64_t bytes) override;
    void on_inbound_lost(uint64_t stream_id) override;
    void on_credit(const CreditReport & report) override;
    void on_link_lost(uint64_t link_id, const std::string & reason) override;

  private:
    using SessionPtr = std::shared_ptr<Session>;

    // A step the engine is about to compute, and what became of it.
    struct Job {
        SessionPtr session;
        ServedPtr served;
        uint64_t epoch = 0;
        uint64_t generation_no = 0;  // head
        uint32_t token_capacity = 0;
        std::shared_ptr<v1::HopStats> stats;
        v1::StepFrame frame;  // boundary: of the hop before until prepare(), for the next hop after compute()
        PendingCredit credit;
        Step step;
        uint32_t cached_before = 0;  // positions the engine holds before a rollback
        StepResult result;
        v1::SampledFrame sampled;
        Refusal refusal;
        bool advanced = false;    // the engine holds the step's tokens
        bool cache_lost = false;  // the engine's sequence had to be given up
        uint64_t compute_us = 0;
        uint64_t sample_us = 0;
    };

    // worker.cpp: what it is, its vocabulary, its life
    v1::DescribeResponse make_description() const;

    // worker_sessions.cpp: calls on sessions
    Refusal check_open(const v1::OpenRequest & request) const;
    Refusal check_room(const v1::Ticket & ticket) const;
    void open_on(const ServedPtr & served, const v1::OpenRequest & request, const OpenReply & reply);
    void use_layers(Session & session, const ServedPtr & served, Effects & effects);
    void place(Session & session, const v1::OpenRequest & request, std::shared_ptr<Link> next,
               std::shared_ptr<Link> head, Effects & effects);
    Refusal check_generate(const v1::GenerateRequest & request) const;
    void remove(const SessionPtr & session, const std::string & why, Effects & effects);

    // worker_housekeeping.cpp: timeouts
    void run_housekeeping();
    void tend(const SessionPtr & session, int64_t now_us, Effects & effects);
    void end(const SessionPtr & session, const std::string & why, Effects & effects);

    // worker_seam.cpp: frames, credits, failures. All but the first under the mutex.
    ServedPtr layers_of(const std::string & session_id) const;
    void take_step(Session & session, v1::StepFrame frame, PendingCredit credit, const Refusal & malformed,
                   Effects & effects);
    void take_sampled(Session & session, const v1::SampledFrame & frame, Effects & effects);
    void take_failure(Session & session, const v1::FailureFrame & frame, Effects & effects);
    void take_end(const SessionPtr & session, const v1::EndFrame & frame, Effects & effects);
    void sampled(Session & session, const v1::SampledFrame & frame, Effects & effects);
    void refuse(Session & session, const Refusal & refusal, Effects & effects);
    void fail(Session & session, v1::Failed failure, Effects & effects);
    void report_failure(Session & session, Effects & effects);
    void peer_lost(Session & session, uint32_t hop_index, const std::string & reason, Effects & effects);
    void end_generation(Session & session, Effects & effects);
    void discard_inbox(Session & session, Effects & effects);
    void let_wait(PendingCredit & credit);
    void send(Session & session, v1::SeamFrame frame, SentFrame sent, Effects & effects);

    // worker_engine.cpp: the engine thread
    void run_engine();
    bool has_work() const;
    bool is_ready(const Session & session) const;
    std::vector<Job> take_jobs(Effects & effects);
    bool take_job(const SessionPtr & session, Job & job, Effects & effects);
    Refusal check_job(const Session & session, const v1::StepFrame & frame) const;
    void compute(std::vector<Job> & jobs);
    Status prepare(Job & job);
    void execute(const Served & served, const std::vector<Job *> & jobs);
    void sample(Job & job);
    void commit(Job & job, Effects & effects);
    void forward(Job & job, Effects & effects);
    void give_up_sequence(const ServedPtr & served, Session & session);
    void close_sequences(std::unique_lock<std::mutex> & lock);

    SessionPtr find(const std::string & session_id) const;

    const ServedPtr whole_;
    const ShardEngine & vocabulary_;
    const EngineDescription & model_;
    const FrameRules & rules_;
    const WorkerOptions options_;
    Parts parts_;
    const TicketVerifier tickets_;
    const v1::DescribeResponse description_;

    mutable std::mutex mutex_;
    std::condition_variable engine_wake_;
    std::condition_variable housekeeping_wake_;
    std::condition_variable drained_;
    bool draining_ = false;
    bool stopping_ = false;
    std::unordered_map<std::string, SessionPtr> sessions_;
    std::vector<std::pair<ServedPtr, int32_t>> sequences_to_close_;
    Scheduler scheduler_;
    v1::StatusResponse totals_;
    std::unordered_map<uint64_t, std::weak_ptr<CreditSink>> waiting_credits_;  // streams to flush at the next tick

    LinkPool links_;
    std::thread engine_thread_;
    std::thread housekeeping_thread_;
};

}  // namespace meshnet
