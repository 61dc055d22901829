#pragma once

#include <chrono>
#include <cstdint>

namespace meshnet {

// Microseconds on the monotonic clock.
inline int64_t now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Seconds since 1970.
inline int64_t unix_now_s() {
    return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
}

}  // namespace meshnet
