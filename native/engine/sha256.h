#pragma once

#include <string>
#include <string_view>

namespace meshnet {

// SHA-256 of `data` as 64 lower-case hex digits.
std::string sha256_hex(std::string_view data);

}  // namespace meshnet
