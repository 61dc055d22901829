#include "worker/channel_args.h"

#include "worker/frame_rules.h"

namespace meshnet {
namespace {

constexpr int ping_interval_ms = 1000;
constexpr int ping_timeout_ms = 2000;
// The server's own pings, for callers that vanished without a word. A gRPC client without a running call may look at
// its connection every five seconds only: it is not dead for that.
constexpr int server_ping_interval_ms = 10'000;
constexpr int server_ping_timeout_ms = 20'000;
constexpr int max_message = static_cast<int>(max_message_bytes);
// Of those that one message brings there are a few.
constexpr int max_credits_message = 1 << 16;
// Fixed instead of probed: the probes are pings in the way of small frames.
constexpr int receive_window_bytes = 8 << 20;
// Calls and streams of one connection.
constexpr int max_calls_per_connection = 1024;

}  // namespace

grpc::ChannelArguments seam_channel_arguments() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, ping_interval_ms);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ping_timeout_ms);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, receive_window_bytes);
    arguments.SetMaxReceiveMessageSize(max_credits_message);
    arguments.SetMaxSendMessageSize(max_message);
    return arguments;
}

void apply_server_arguments(grpc::ServerBuilder & builder) {
    builder.SetMaxReceiveMessageSize(max_message);
    builder.SetMaxSendMessageSize(max_message);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, server_ping_interval_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, server_ping_timeout_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, ping_interval_ms / 4);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, receive_window_bytes);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, max_calls_per_connection);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

}  // namespace meshnet
