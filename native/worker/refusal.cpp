#include "worker/refusal.h"

namespace meshnet {
namespace {

grpc::StatusCode status_code(v1::Refusal code) {
    switch (code) {
    case v1::REFUSAL_BAD_REQUEST:
    case v1::REFUSAL_TOO_LONG:
        return grpc::StatusCode::INVALID_ARGUMENT;
    case v1::REFUSAL_BAD_TICKET:
        return grpc::StatusCode::UNAUTHENTICATED;
    case v1::REFUSAL_NO_CAPACITY:
    case v1::REFUSAL_FLOW_CONTROL:
        return grpc::StatusCode::RESOURCE_EXHAUSTED;
    case v1::REFUSAL_UNKNOWN_SESSION:
        return grpc::StatusCode::NOT_FOUND;
    case v1::REFUSAL_DRAINING:
    case v1::REFUSAL_PEER_LOST:
        return grpc::StatusCode::UNAVAILABLE;
    case v1::REFUSAL_CANCELLED:
        return grpc::StatusCode::CANCELLED;
    case v1::REFUSAL_ENGINE_FAILURE:
        return grpc::StatusCode::INTERNAL;
    default:
        return grpc::StatusCode::FAILED_PRECONDITION;
    }
}

}  // namespace

Refusal bad_request(std::string message) {
    return {v1::REFUSAL_BAD_REQUEST, std::move(message), 0, 0};
}

std::string printable(const std::string & text) {
    std::string clean = text.substr(0, 500);
    for (char & c : clean) {
        c = c >= 32 && c < 127 ? c : '?';
    }
    return clean;
}

Refusal refusal_of(const Status & status) {
    switch (status.code) {
    case Code::ok:
        return Refusal::none();
    case Code::invalid_argument:
        return {v1::REFUSAL_BAD_REQUEST, status.message, 0, 0};
    case Code::failed_precondition:
        return {v1::REFUSAL_PREFIX_MISMATCH, status.message, 0, 0};
    case Code::no_rollback:
        return {v1::REFUSAL_NO_ROLLBACK, status.message, 0, 0};
    case Code::resource_exhausted:
        return {v1::REFUSAL_NO_CAPACITY, status.message, 0, 0};
    default:
        return {v1::REFUSAL_ENGINE_FAILURE, status.message, 0, 0};
    }
}

grpc::Status to_status(const Refusal & refusal, grpc::CallbackServerContext & context) {
    if (!refusal.refused()) {
        return grpc::Status::OK;
    }
    v1::RefusalDetail detail;
    detail.set_refusal(refusal.code);
    detail.set_message(refusal.message);
    detail.set_requested(refusal.requested);
    detail.set_limit(refusal.limit);
    context.AddTrailingMetadata(refusal_metadata, detail.SerializeAsString());
    return {status_code(refusal.code), refusal.message};
}

}  // namespace meshnet
