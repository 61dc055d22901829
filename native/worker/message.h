// Messages as bytes: read with a bound on what they take in memory, before anything is allocated for them.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>

#include "worker/refusal.h"

namespace meshnet {

// Most bytes of a message beside its bulk: texts, bytes and packed tokens, which take no more memory than room in the
// message. Everything else may take a hundred times as much: 64 MiB of empty parts would be gigabytes.
constexpr uint64_t max_small_parts_bytes = 1 << 20;

// Reads `bytes` into `message`, whoever sent them. Refuses what is no such message, or has too many small parts.
Refusal read_message(grpc::ByteBuffer & bytes, google::protobuf::Message & message);

grpc::ByteBuffer to_bytes(const google::protobuf::Message & message);

}  // namespace meshnet
