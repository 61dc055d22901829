// The tokens a session holds in Hot KV and the running hash of every prefix of them (see StepFrame in shard.proto).
#pragma once

#include <cstdint>
#include <vector>

namespace meshnet {

inline constexpr uint64_t prefix_hash_seed = 0x6d6573686e657431ULL;

inline constexpr uint64_t golden_ratio = 0x9e3779b97f4a7c15ULL;

inline uint64_t splitmix64_mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    x ^= x >> 31;
    return x;
}

inline uint64_t extend_prefix_hash(uint64_t hash, int32_t token) {
    return splitmix64_mix(hash ^ (static_cast<uint64_t>(static_cast<uint32_t>(token)) + golden_ratio));
}

class PrefixHistory {
  public:
    uint32_t length() const {
        return static_cast<uint32_t>(tokens_.size());
    }
    const std::vector<int32_t> & tokens() const {
        return tokens_;
    }
    // Hash of the first `position` tokens; position <= length().
    uint64_t hash_at(uint32_t position) const {
        return position == 0 ? prefix_hash_seed : hashes_[position - 1];
    }
    uint64_t hash() const {
        return hash_at(length());
    }
    void append(const std::vector<int32_t> & tokens) {
        for (const int32_t token : tokens) {
            hashes_.push_back(extend_prefix_hash(hash(), token));
            tokens_.push_back(token);
        }
    }
    // Keeps the first `position` tokens; position <= length().
    void truncate(uint32_t position) {
        tokens_.resize(position);
        hashes_.resize(position);
    }

  private:
    std::vector<int32_t> tokens_;
    std::vector<uint64_t> hashes_;  // hashes_[i] covers tokens_[0..i]
};

}  // namespace meshnet
