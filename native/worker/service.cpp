#include "worker/service.h"

#include <exception>

#include "meshnet/v1/shard.grpc.pb.h"
#include "worker/channel_args.h"
#include "worker/generate_stream.h"
#include "worker/single_poller.h"
#include "worker/task_thread.h"

namespace meshnet {
namespace {

// Vocabulary calls that may wait for the one that runs.
constexpr size_t max_vocabulary_calls = 64;

// Runs one call; whatever goes wrong is a status.
template <typename Call>
void finish(grpc::CallbackServerContext & context, grpc::ServerUnaryReactor & reactor, const Call & call) {
    Refusal refusal;
    try {
        refusal = call();
    } catch (const std::exception & error) {
        refusal = {v1::REFUSAL_ENGINE_FAILURE, std::string("the call failed: ") + error.what(), 0, 0};
    }
    reactor.Finish(to_status(refusal, context));
}

template <typename Call>
grpc::ServerUnaryReactor * answer(grpc::CallbackServerContext * context, const Call & call) {
    auto * reactor = context->DefaultReactor();
    finish(*context, *reactor, call);
    return reactor;
}

class ShardService final : public v1::Shard::CallbackService {
  public:
    explicit ShardService(Worker & worker) : worker_(worker) {}

    grpc::ServerUnaryReactor * Describe(grpc::CallbackServerContext * context, const v1::DescribeRequest *,
                                        v1::DescribeResponse * response) override {
        return answer(context, [&] {
            *response = worker_.description();
            return Refusal::none();
        });
    }

    grpc::ServerUnaryReactor * Status(grpc::CallbackServerContext * context, const v1::StatusRequest *,
                                      v1::StatusResponse * response) override {
        return answer(context, [&] {
            *response = worker_.status();
            return Refusal::none();
        });
    }

    grpc::ServerUnaryReactor * Tokenize(grpc::CallbackServerContext * context, const v1::TokenizeRequest * request,
                                        v1::TokenizeResponse * response) override {
        return answer_later(context, [=] { return worker_.tokenize(*request, *response); });
    }

    grpc::ServerUnaryReactor * Detokenize(grpc::CallbackServerContext * context, const v1::DetokenizeRequest * request,
                                          v1::DetokenizeResponse * response) override {
        return answer_later(context, [=] { return worker_.detokenize(*request, *response); });
    }

    grpc::ServerUnaryReactor * Open(grpc::CallbackServerContext * context, const v1::OpenRequest * request,
                                    v1::OpenResponse * response) override {
        auto * reactor = context->DefaultReactor();
        worker_.open(*request, [=](const Refusal & refusal, const v1::OpenResponse & opened) {
            *response = opened;
            reactor->Finish(to_status(refusal, *context));
        });
        return reactor;
    }

    grpc::ServerWriteReactor<v1::GenerateEvent> * Generate(grpc::CallbackServerContext * context,
                                                           const v1::GenerateRequest * request) override {
        return GenerateStream::start(worker_, *context, *request);
    }

    grpc::ServerUnaryReactor * Close(grpc::CallbackServerContext * context, const v1::CloseRequest * request,
                                     v1::CloseResponse * response) override {
        return answer(context, [&] { return worker_.close(*request, *response); });
    }

    grpc::ServerUnaryReactor * Touch(grpc::CallbackServerContext * context, const v1::TouchRequest * request,
                                     v1::TouchResponse * response) override {
        return answer(context, [&] { return worker_.touch(*request, *response); });
    }

  private:
    // A long text takes a while: not on a network thread.
    template <typename Call>
    grpc::ServerUnaryReactor * answer_later(grpc::CallbackServerContext * context, const Call & call) {
        auto * reactor = context->DefaultReactor();
        if (!vocabulary_.post([=] { finish(*context, *reactor, call); })) {
            finish(*context, *reactor, [] {
                return Refusal{v1::REFUSAL_NO_CAPACITY, "too many vocabulary calls are waiting; try again", 0, 0};
            });
        }
        return reactor;
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
