// Inbound seam streams: the server's side of Carry.
#pragma once

#include <grpcpp/grpcpp.h>

#include <string>

#include "worker/refusal.h"
#include "worker/seam_types.h"

namespace meshnet {

// Called from network threads, without any lock held.
class FrameReceiver {
  public:
    virtual ~FrameReceiver() = default;
    // Takes a frame of `bytes` on the wire. A refusal ends the stream: the frame names no session.
    virtual Refusal on_frame(PendingCredit credit, v1::SeamFrame frame, uint64_t bytes) = 0;
    // The stream broke (not: was closed by its sender).
    virtual void on_inbound_lost(uint64_t stream_id) = 0;
};

// Starts a reactor that reads raw messages (so that an unreadable one is our refusal, not a silent end), hands them to
// `receiver`, and returns credits. It owns itself until gRPC is done with it.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> * start_inbound(FrameReceiver & receiver);

}  // namespace meshnet
