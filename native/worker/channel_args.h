// gRPC settings that both ends of a seam share.
#pragma once

#include <grpcpp/grpcpp.h>

namespace meshnet {

// Outbound seam channels: pings every second and a two-second answer limit, so that a hung peer breaks the stream
// soon; an own connection per link; no HTTP proxy.
grpc::ChannelArguments seam_channel_arguments();

// The worker's server: tolerance for those pings, and slow ones of its own towards callers.
void apply_server_arguments(grpc::ServerBuilder & builder);

}  // namespace meshnet
