// What the worker's tests share: engines, workers with a server on loopback, routes over them, and a bare seam client.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/shard_engine.h"
#include "meshnet/v1/shard.grpc.pb.h"
#include "worker/service.h"
#include "worker/worker.h"

namespace meshnet::test {

// Generous: a test that needs it is stuck.
inline constexpr int64_t deadline_ms = 30'000;

std::unique_ptr<ShardEngine> make_engine(const std::string & model, LayerRange layers, uint32_t session_tokens = 2048,
                                         uint32_t sequences = 32, uint32_t step_tokens = 512);

// Polls until `condition` holds. False at the deadline.
bool eventually(const std::function<bool()> & condition);

// Passes everything to another engine; a test can hold steps back, count them and make them fail.
class ControlledEngine final : public ShardEngine {
  public:
    struct StepShape {
        uint32_t position = 0;
        size_t tokens = 0;

        bool operator==(const StepShape & other) const {
            return position == other.position && tokens == other.tokens;
        }
        bool operator<(const StepShape & other) const {
            return std::tie(position, tokens) < std::tie(other.position, other.tokens);
        }
    };

    struct Control {
        std::mutex mutex;
        std::condition_variable changed;
        bool held = false;    // execute() waits
        uint32_t passes = 0;  // ... except this often
        int waiting = 0;
        uint64_t executed = 0;
        std::vector<StepShape> steps;  // all that came
        Status failure;                // returned instead of computing
        bool throws = false;           // or thrown
        bool no_rollback = false;
        bool vocabulary_held = false;  // tokenize() waits
        int vocabulary_waiting = 0;

        void set(const std::function<void(Control &)> & change);
        void hold();
        void release();
        // Lets so many held steps pass.
        void pass(uint32_t n = 1);
        // Waits until a step is held.
        bool wait_held();
        uint64_t executed_steps();
        std::vector<StepShape> taken_steps();
    };

    ControlledEngine(std::unique_ptr<ShardEngine> inner, std::shared_ptr<Control> control);

    const EngineDescription & describe() const override;
    Status open_sequence(int32_t & sequence) override;
    Status close_sequence(int32_t sequence) override;
    Status rollback(int32_t sequence, uint32_t position) override;
    Status execute(const std::vector<Step> & steps, std::vector<StepResult> & results) override;
    Status tokenize(std::string_view text, bool add_special, bool parse_special,
                    std::vector<int32_t> & tokens) const override;
    Status piece(int32_t token, std::string & bytes) const override;
    bool is_eog(int32_t token) const override;

  private:
    std::unique_ptr<ShardEngine> inner_;
    std::shared_ptr<Control> control_;
};

// What a generation brought.
struct Outcome {
    std::vector<v1::GeneratedToken> tokens;
    std::vector<v1::PrefillProgress> prefill;
    std::optional<v1::Finished> finished;
    std::optional<v1::Failed> failed;
    grpc::Status status;
    v1::RefusalDetail refusal;  // of status

    std::string text() const;
    std::vector<uint32_t> ids() const;
};

v1::RefusalDetail refusal_in(const grpc::ClientContext & context);

// Where a hop is: in this process or in another.
struct HopAddress {
    std::string address;
    v1::DescribeResponse description;
};

// A client of the Shard service of one worker.
class HopClient {
  public:
    explicit HopClient(const std::string & address);

    v1::DescribeResponse describe() const;
    v1::StatusResponse status() const;
    grpc::Status open(const v1::OpenRequest & request, v1::OpenResponse & response, v1::RefusalDetail & refusal) const;
    grpc::Status close(const v1::Ticket & ticket, v1::CloseResponse & response, v1::RefusalDetail & refusal) const;
    grpc::Status touch(const v1::Ticket & ticket, v1::TouchResponse & response) const;
    Outcome generate(const v1::GenerateRequest & request,
                     const std::function<void(const v1::GenerateEvent &)> & each = {},
                     grpc::ClientContext * context = nullptr) const;
    v1::Shard::Stub & stub() const {
        return *stub_;
    }

  private:
    std::unique_ptr<v1::Shard::Stub> stub_;
};

// A worker and its server in this process.
class Hop {
  public:
    explicit Hop(std::unique_ptr<ShardEngine> engine, WorkerOptions options = {}, LoadPart load_part = {});
    // A test-engine shard, which can be cut anywhere.
    Hop(const std::string & model, LayerRange layers, WorkerOptions options = {}, uint32_t sequences = 32,
        uint32_t session_tokens = 2048);
    ~Hop();

    Worker & worker() {
        return *worker_;
    }
    ControlledEngine::Control & control() {
        return *control_;
    }
    HopClient & client() {
        return *client_;
    }
    HopAddress address() const;
    void stop();

  private:
    std::shared_ptr<ControlledEngine::Control> control_ = std::make_shared<ControlledEngine::Control>();
    std::unique_ptr<Worker> worker_;
    std::unique_ptr<WorkerServer> server_;
    std::unique_ptr<HopClient> client_;
};

// The hop as a route sees it that uses only layers [start, end) of it.
HopAddress part_of(HopAddress hop, uint32_t start, uint32_t end);

std::string new_session_id();

// One session over hops that are reached by address.
class TestSession {
  public:
    explicit TestSession(std::vector<HopAddress> hops, std::string id = new_session_id());

    const std::string & id() const {
        return id_;
    }
    v1::OpenRequest open_request(size_t hop) const;
    v1::GenerateRequest generate_request(const std::string & prompt, uint32_t max_new_tokens) const;
    v1::Ticket ticket() const;

    // Opens every hop, the tail first; fails the test on a refusal.
    std::vector<v1::OpenResponse> open();
    Outcome generate(const std::string & prompt, uint32_t max_new_tokens) const;
    std::vector<v1::CloseResponse> close();

    uint64_t epoch = 1;
    uint32_t token_capacity = 2048;

    const HopClient & client(size_t hop) const {
        return *clients_[hop];
    }

  private:
    std::string id_;
    std::vector<HopAddress> hops_;
    std::vector<std::shared_ptr<HopClient>> clients_;
};

// In-process hops that cut a model at `cuts`, e.g. {0, 4, 8}.
std::vector<std::unique_ptr<Hop>> make_hops(const std::string & model, const std::vector<int32_t> & cuts,
                                            WorkerOptions options = {});
std::vector<HopAddress> addresses(const std::vector<std::unique_ptr<Hop>> & hops);

// What a whole-model engine in a plain loop answers: tokens, the last of which may be an end-of-generation token.
std::vector<uint32_t> direct_tokens(const std::string & model, const std::string & prompt, uint32_t max_new_tokens,
                                    const v1::SamplingParams & params = {}, bool ignore_eog = false);

// A peer on the seam that the test scripts.
class SeamPeer {
  public:
    explicit SeamPeer(const std::string & address);
    ~SeamPeer();

    // Sends a frame (numbering it) and returns its number.
    uint64_t send(v1::SeamFrame frame);
    // Sends bytes that need be no frame.
    void send_raw(const std::string & bytes);
    // The next credit; nothing if the stream ended.
    std::optional<v1::SeamCredit> credit();
    // Messages that brought the credits read so far.
    size_t messages() const {
        return messages_;
    }
    // Half-closes, and returns how the stream ended.
    grpc::Status finish();

  private:
    grpc::ClientContext context_;
    std::shared_ptr<grpc::Channel> channel_;
    std::unique_ptr<grpc::internal::RpcMethod> method_;
    std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream_;
    std::deque<v1::SeamCredit> credits_;  // read, not yet returned
    size_t messages_ = 0;
    uint64_t frame_no_ = 0;
};

// A Seam server that records what a worker sends to its head (or next hop) and gives credit.
class FakeNeighbour final : public v1::Seam::Service {
  public:
    FakeNeighbour();
    ~FakeNeighbour() override;

    const std::string & address() const {
        return address_;
    }
    // The next frame; nothing at the deadline.
    std::optional<v1::SeamFrame> next_frame();
    // How often credit is given for a frame; once, unless told otherwise.
    void give_credit(int times);

  private:
    grpc::Status Carry(grpc::ServerContext * context,
                       grpc::ServerReaderWriter<v1::SeamCredits, v1::SeamFrame> * stream) override;

    std::mutex mutex_;
    std::condition_variable arrived_;
    std::vector<v1::SeamFrame> frames_;
    int credits_per_frame_ = 1;
    std::string address_;
    std::unique_ptr<grpc::Server> server_;
};

// A well-formed step for a shard of a test model that is not the head: all-zero states.
v1::SeamFrame step_frame(const std::string & session_id, uint64_t epoch, uint32_t position,
                         const std::vector<uint32_t> & prefix, const std::vector<uint32_t> & tokens);

}  // namespace meshnet::test
