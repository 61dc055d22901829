#include "worker/ticket.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "worker/convert.h"

namespace meshnet {
namespace {

int hex_value(char c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

}  // namespace

TicketVerifier::TicketVerifier(std::string key, std::string shard_id)
    : key_(std::move(key)), shard_id_(std::move(shard_id)) {}

bool TicketVerifier::parse_key(const std::string & hex, std::string & key) {
    key.clear();
    if (hex.size() % 2 != 0) {
        return false;
    }
    for (size_t i = 0; i < hex.size(); i += 2) {
        const int high = hex_value(hex[i]);
        const int low = hex_value(hex[i + 1]);
        if (high < 0 || low < 0) {
            return false;
        }
        key.push_back(static_cast<char>(high * 16 + low));
    }
    return true;
}

Refusal TicketVerifier::check(const v1::Ticket & ticket, int64_t unix_now_s) const {
    if (auto refusal = check_authentic(ticket); refusal.refused()) {
        return refusal;
    }
    if (!key_.empty() && ticket.expires_unix_s() < static_cast<uint64_t>(unix_now_s)) {
        return {v1::REFUSAL_BAD_TICKET, "the ticket has expired; ask the tracker for a new one", 0, 0};
    }
    return Refusal::none();
}

Refusal TicketVerifier::check_authentic(const v1::Ticket & ticket) const {
    if (ticket.session_id().size() != session_id_bytes) {
        return bad_request("ticket.session_id must be 16 bytes, not " + std::to_string(ticket.session_id().size()));
    }
    if (key_.empty()) {
        return Refusal::none();
    }
    const std::string text = "meshnet-ticket-v1\n" + hex_of(ticket.session_id()) + "\n" +
                             std::to_string(ticket.epoch()) + "\n" + shard_id_ + "\n" +
                             std::to_string(ticket.expires_unix_s());
    unsigned char mac[EVP_MAX_MD_SIZE];
    unsigned int mac_bytes = 0;
    HMAC(EVP_sha256(), key_.data(), static_cast<int>(key_.size()), reinterpret_cast<const unsigned char *>(text.data()),
         text.size(), mac, &mac_bytes);
    if (ticket.mac().size() != mac_bytes || CRYPTO_memcmp(ticket.mac().data(), mac, mac_bytes) != 0) {
        return {v1::REFUSAL_BAD_TICKET, "the ticket is not for this worker, session and epoch", 0, 0};
    }
    return Refusal::none();
}

}  // namespace meshnet
