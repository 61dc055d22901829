// Why a request, a frame or a session is refused, and how that is told over gRPC.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <string>

#include "engine/shard_engine.h"
#include "meshnet/v1/shard.pb.h"

namespace meshnet {

// Name of the trailing metadata that holds a serialized RefusalDetail.
inline constexpr char refusal_metadata[] = "meshnet-refusal-bin";

struct [[nodiscard]] Refusal {
    v1::Refusal code = v1::REFUSAL_UNSPECIFIED;
    std::string message;
    // For limits: what was asked for and what is allowed.
    uint64_t requested = 0;
    uint64_t limit = 0;

    bool refused() const {
        return code != v1::REFUSAL_UNSPECIFIED;
    }
    static Refusal none() {
        return {};
    }
};

Refusal bad_request(std::string message);

// Text from a peer, fit to be repeated in a message: cut, and nothing but printable ASCII.
std::string printable(const std::string & text);

// What an engine's failure means to a peer.
Refusal refusal_of(const Status & status);

// gRPC status of a refusal; adds the detail to the call's trailing metadata.
grpc::Status to_status(const Refusal & refusal, grpc::CallbackServerContext & context);

}  // namespace meshnet
