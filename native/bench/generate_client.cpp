// The benchmark's client, so lean that it hardly takes the cores from those that compute:
// `meshnet-generate-client ADDRESS` makes the call of the serialized GenerateRequest on its standard input, reads all
// events and prints one line of JSON: what came and when, or {"error": "..."} with exit code 1.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>

#include "meshnet/v1/shard.grpc.pb.h"

namespace {

namespace v1 = meshnet::v1;
using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

constexpr std::chrono::seconds connect_limit{10};

struct Outcome {
    uint64_t tokens = 0;
    Clock::duration to_first{};
    Clock::duration decode{};
    v1::Finished finished;
};

v1::GenerateRequest read_request() {
    const std::string input(std::istreambuf_iterator<char>(std::cin), {});
    v1::GenerateRequest request;
    if (!request.ParseFromString(input)) {
        throw std::runtime_error("standard input is not a GenerateRequest");
    }
    return request;
}

// Connecting is not part of what is timed.
std::shared_ptr<grpc::Channel> connect(const std::string & address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    auto channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    const auto deadline = std::chrono::system_clock::now() + connect_limit;
    while (true) {
        const grpc_connectivity_state state = channel->GetState(true);
        if (state == GRPC_CHANNEL_READY) {
            return channel;
        }
        if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || !channel->WaitForStateChange(state, deadline)) {
            throw std::runtime_error("no connection to " + address);
        }
    }
}

Outcome generate(const std::string & address) {
    const v1::GenerateRequest request = read_request();
    const auto stub = v1::Shard::NewStub(connect(address));
    Outcome outcome;
    std::string error;
    grpc::ClientContext context;
    v1::GenerateEvent event;
    Clock::time_point first;
    const Clock::time_point began = Clock::now();
    const auto reader = stub->Generate(&context, request);
    while (reader->Read(&event)) {
        if (event.has_token()) {
            const Clock::time_point now = Clock::now();
            first = outcome.tokens++ == 0 ? now : first;
            outcome.to_first = first - began;
            outcome.decode = now - first;
        } else if (event.has_finished()) {
            outcome.finished = event.finished();
        } else if (event.has_failed()) {
            const v1::Failed & failed = event.failed();
            error = "the route failed at hop " + std::to_string(failed.hop_index()) + ": " + failed.message();
        }
    }
    const grpc::Status status = reader->Finish();
    if (error.empty() && !status.ok()) {
        error = "the head ended the call with gRPC status " + std::to_string(status.error_code()) + ": " +
                status.error_message();
    } else if (error.empty() && outcome.finished.cause() == v1::FINISH_UNSPECIFIED) {
        error = "the stream ended after " + std::to_string(outcome.tokens) + " tokens, without a cause";
    }
    return error.empty() ? outcome : throw std::runtime_error(error);
}

// What came from elsewhere may hold anything: nothing but printable ASCII is repeated.
std::string json_string(const std::string & text) {
    std::string json = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            json += '\\';
        }
        json += c >= 32 && c < 127 ? c : '?';
    }
    return json + '"';
}

}  // namespace

int main(int argc, char ** argv) try {
    if (argc != 2) {
        throw std::runtime_error("usage: meshnet-generate-client ADDRESS");
    }
    const Outcome outcome = generate(argv[1]);
    const v1::Finished & finished = outcome.finished;
    std::printf("{\"tokens\": %" PRIu64 ", \"first_token_us\": %.1f, \"client_decode_us\": %.1f, \"cause\": %s, "
                "\"generated_tokens\": %" PRIu32 ", \"prefill_us\": %" PRIu64 ", \"decode_us\": %" PRIu64 "}\n",
                outcome.tokens, Microseconds(outcome.to_first).count(), Microseconds(outcome.decode).count(),
                json_string(v1::FinishCause_Name(finished.cause())).c_str(), finished.generated_tokens(),
                finished.prefill_us(), finished.decode_us());
    return 0;
} catch (const std::exception & error) {
    std::printf("{\"error\": %s}\n", json_string(error.what()).c_str());
    return 1;
}
