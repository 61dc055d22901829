#include "worker/service.h"

#include <exception>
#include <memory>

#include "meshnet/v1/shard.grpc.pb.h"
#include "worker/channel_args.h"
#include "worker/generate_stream.h"
#include "worker/message.h"
#include "worker/single_poller.h"
#include "worker/task_thread.h"

namespace meshnet {
namespace {

// Vocabulary calls that may wait for the one that runs.
constexpr size_t max_vocabulary_calls = 64;

// One call, from its request's bytes to its response's. They are read here and not by gRPC, which reads what anybody
// sends, however much memory that takes. Owns itself until it has ended.
template <typename Request, typename Response>
class UnaryCall {
  public:
    // `run(call)` sees to it that the call ends. It is not run if the bytes are no request.
    template <typename Run>
    static grpc::ServerUnaryReactor * start(grpc::CallbackServerContext * context, const grpc::ByteBuffer * bytes,
                                            grpc::ByteBuffer * answer, const Run & run) {
        const auto call = std::make_shared<UnaryCall>(context, answer);
        auto * reactor = call->reactor_;
        grpc::ByteBuffer copy(*bytes);
        if (const auto refusal = read_message(copy, call->request); refusal.refused()) {
            call->end(refusal);
        } else {
            run(call);
        }
        return reactor;
    }

    UnaryCall(grpc::CallbackServerContext * context, grpc::ByteBuffer * answer)
        : context_(context), answer_(answer), reactor_(context->DefaultReactor()) {}

    // Does the work and ends the call; whatever goes wrong is a status.
    template <typename Work>
    void work(const Work & work) {
        Refusal refusal;
        try {
            refusal = work();
        } catch (const std::exception & error) {
            refusal = {v1::REFUSAL_ENGINE_FAILURE, std::string("the call failed: ") + error.what(), 0, 0};
        }
        end(refusal);
    }

    void end(const Refusal & refusal) {
        if (!refusal.refused()) {
            *answer_ = to_bytes(response);
        }
        reactor_->Finish(to_status(refusal, *context_));
    }

    Request request;
    Response response;

  private:
    grpc::CallbackServerContext * const context_;
    grpc::ByteBuffer * const answer_;
    grpc::ServerUnaryReactor * const reactor_;
};

template <typename Base>
using RawShardMethods = v1::Shard::WithRawCallbackMethod_Describe<v1::Shard::WithRawCallbackMethod_Status<
    v1::Shard::WithRawCallbackMethod_Tokenize<v1::Shard::WithRawCallbackMethod_Detokenize<
        v1::Shard::WithRawCallbackMethod_Open<v1::Shard::WithRawCallbackMethod_Generate<
            v1::Shard::WithRawCallbackMethod_Close<v1::Shard::WithRawCallbackMethod_Touch<Base>>>>>>>>;

class ShardService final : public RawShardMethods<v1::Shard::Service> {
  public:
    explicit ShardService(Worker & worker) : worker_(worker) {}

    grpc::ServerUnaryReactor * Describe(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                        grpc::ByteBuffer * answer) override {
        return at_once<v1::DescribeRequest, v1::DescribeResponse>(context, request, answer, [this](auto & call) {
            call.response = worker_.description();
            return Refusal::none();
        });
    }

    grpc::ServerUnaryReactor * Status(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                      grpc::ByteBuffer * answer) override {
        return at_once<v1::StatusRequest, v1::StatusResponse>(context, request, answer, [this](auto & call) {
            call.response = worker_.status();
            return Refusal::none();
        });
    }

    grpc::ServerUnaryReactor * Tokenize(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                        grpc::ByteBuffer * answer) override {
        return later<v1::TokenizeRequest, v1::TokenizeResponse>(
            context, request, answer, [this](auto & call) { return worker_.tokenize(call.request, call.response); });
    }

    grpc::ServerUnaryReactor * Detokenize(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                          grpc::ByteBuffer * answer) override {
        return later<v1::DetokenizeRequest, v1::DetokenizeResponse>(
            context, request, answer, [this](auto & call) { return worker_.detokenize(call.request, call.response); });
    }

    grpc::ServerUnaryReactor * Open(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                    grpc::ByteBuffer * answer) override {
        return UnaryCall<v1::OpenRequest, v1::OpenResponse>::start(context, request, answer, [this](const auto & call) {
            worker_.open(call->request, [call](const Refusal & refusal, const v1::OpenResponse & opened) {
                call->response = opened;
                call->end(refusal);
            });
        });
    }

    grpc::ServerWriteReactor<grpc::ByteBuffer> * Generate(grpc::CallbackServerContext * context,
                                                          const grpc::ByteBuffer * request) override {
        grpc::ByteBuffer copy(*request);
        return GenerateStream::start(worker_, *context, copy);
    }

    grpc::ServerUnaryReactor * Close(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                     grpc::ByteBuffer * answer) override {
        return at_once<v1::CloseRequest, v1::CloseResponse>(
            context, request, answer, [this](auto & call) { return worker_.close(call.request, call.response); });
    }

    grpc::ServerUnaryReactor * Touch(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                     grpc::ByteBuffer * answer) override {
        return at_once<v1::TouchRequest, v1::TouchResponse>(
            context, request, answer, [this](auto & call) { return worker_.touch(call.request, call.response); });
    }

  private:
    template <typename Request, typename Response, typename Work>
    static grpc::ServerUnaryReactor * at_once(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                              grpc::ByteBuffer * answer, const Work & work) {
        return UnaryCall<Request, Response>::start(context, request, answer,
                                                   [&](const auto & call) { call->work([&] { return work(*call); }); });
    }

    // A long text takes a while: not on a network thread.
    template <typename Request, typename Response, typename Work>
    grpc::ServerUnaryReactor * later(grpc::CallbackServerContext * context, const grpc::ByteBuffer * request,
                                     grpc::ByteBuffer * answer, const Work & work) {
        return UnaryCall<Request, Response>::start(context, request, answer, [&](const auto & call) {
            if (!vocabulary_.post([call, work] { call->work([&] { return work(*call); }); })) {
                call->end({v1::REFUSAL_NO_CAPACITY, "too many vocabulary calls are waiting; try again", 0, 0});
            }
        });
    }

    Worker & worker_;
    TaskThread vocabulary_{max_vocabulary_calls};
};

class SeamService final : public v1::Seam::WithRawCallbackMethod_Carry<v1::Seam::Service> {
  public:
    explicit SeamService(Worker & worker) : worker_(worker) {}

    grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> * Carry(grpc::CallbackServerContext *) override {
        return start_inbound(worker_);
    }

  private:
    Worker & worker_;
};

}  // namespace

struct WorkerServer::Impl {
    explicit Impl(Worker & worker) : shard(worker), seam(worker) {}

    ShardService shard;
    SeamService seam;
    std::unique_ptr<grpc::Server> server;
    std::unique_ptr<SinglePoller> poller;
};

WorkerServer::WorkerServer(Worker & worker) : impl_(std::make_unique<Impl>(worker)) {}

WorkerServer::~WorkerServer() {
    stop(0);
}

bool WorkerServer::start(const std::string & listen, std::string & problem) {
    const size_t colon = listen.rfind(':');
    if (!is_address(listen)) {
        problem = "'" + listen + "' is not HOST:PORT, for example 127.0.0.1:0";
        return false;
    }
    int port = 0;
    grpc::ServerBuilder builder;
    apply_server_arguments(builder);
    builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&impl_->shard);
    builder.RegisterService(&impl_->seam);
    impl_->server = builder.BuildAndStart();
    if (impl_->server == nullptr || port == 0) {
        problem = "cannot listen on " + listen + ": the address is in use or not one of this machine's";
        return false;
    }
    impl_->poller = std::make_unique<SinglePoller>();
    address_ = listen.substr(0, colon) + ":" + std::to_string(port);
    return true;
}

void WorkerServer::stop(int64_t grace_ms) {
    if (impl_->server != nullptr) {
        impl_->server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(grace_ms));
        impl_->server->Wait();
    }
    impl_->poller.reset();
}

}  // namespace meshnet
