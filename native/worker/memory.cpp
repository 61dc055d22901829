#include "worker/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace meshnet {
namespace {

constexpr uint64_t unlimited = std::numeric_limits<uint64_t>::max();

// The number after `name` in a file of names and numbers; without a name, the file's only number.
bool read_number(const std::string & path, const std::string & name, uint64_t & number) {
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string first;
        if ((name.empty() || (words >> first && first == name)) && words >> number) {
            return true;
        }
    }
    return false;
}

struct Names {
    const char * root;
    const char * limit;
    const char * usage;
    const char * cache;
};

constexpr Names version_2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
constexpr Names version_1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};

// What the limits of a group and of those around it leave. Caches can be dropped: no use.
uint64_t group_room(const std::string & root, const Names & names, std::string group) {
    uint64_t room = unlimited;
    while (true) {
        // Inside a container the group's path may be the host's, and only the root be there.
        const std::string directory = root + names.root + group + "/";
        uint64_t limit = 0;
        uint64_t usage = 0;
        uint64_t cached = 0;
        if (read_number(directory + names.limit, "", limit) && read_number(directory + names.usage, "", usage)) {
            read_number(directory + "memory.stat", names.cache, cached);
            usage -= std::min(usage, cached);
            room = std::min(room, limit - std::min(limit, usage));
        }
        if (group.empty()) {
            return room;
        }
        group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
    }
}

}  // namespace

uint64_t free_memory_bytes(const std::string & root) {
    uint64_t kilobytes = 0;
    uint64_t room = unlimited;
    if (read_number(root + "/proc/meminfo", "MemAvailable:", kilobytes)) {
        room = kilobytes * 1024;
    }
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const std::string group = line.substr(second + 1);
        if (controllers == ",,") {
            room = std::min(room, group_room(root, version_2, group));
        } else if (controllers.find(",memory,") != std::string::npos) {
            room = std::min(room, group_room(root, version_1, group));
        }
    }
    return room;
}

}  // namespace meshnet
