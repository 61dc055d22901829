// Memory that is left on this machine.
#pragma once

#include <cstdint>
#include <string>

namespace meshnet {

// Memory that could be taken without swapping, within the limits of this process's control groups. The largest number
// where the system does not say. `root` is where the system tells it, for tests.
uint64_t free_memory_bytes(const std::string & root = "");

}  // namespace meshnet
