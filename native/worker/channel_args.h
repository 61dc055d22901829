// gRPC settings that both ends of a seam share.
#pragma once

#include <grpcpp/grpcpp.h>

namespace meshnet {

// Outbound seam channels: pings every second and a two-second answer limit, so that a hung peer breaks the stream
// soon; an own connection per link; no HTTP proxy.
grpc::ChannelArguments seam_channel_arguments();

// The worker's server: the same pings towards callers, and tolerance for theirs.
void apply_server_arguments(grpc::ServerBuilder & builder);

}  // namespace meshnet
