// Checks that a call may use this worker (see Ticket in shard.proto).
#pragma once

#include <cstdint>
#include <string>

#include "meshnet/v1/shard.pb.h"
#include "worker/refusal.h"

namespace meshnet {

inline constexpr size_t session_id_bytes = 16;

class TicketVerifier {
  public:
    // An empty key accepts any ticket with a well-formed session id.
    TicketVerifier(std::string key, std::string shard_id);

    // Reads a key written in hex. False if `hex` is not an even number of hex digits.
    static bool parse_key(const std::string & hex, std::string & key);

    // BAD_REQUEST for a malformed session id, BAD_TICKET for a forged ticket, or one that is expired at `unix_now_s`.
    Refusal check(const v1::Ticket & ticket, int64_t unix_now_s) const;
    // The same without the expiry: for calls on a session that a fresh ticket has opened.
    Refusal check_authentic(const v1::Ticket & ticket) const;

  private:
    std::string key_;
    std::string shard_id_;
};

}  // namespace meshnet
