#include "worker/log.h"

#include <unistd.h>

#include <ctime>

namespace meshnet {

void log_line(LogLevel level, const std::string & message) {
    static const char * const names[] = {"INFO", "WARNING", "ERROR"};
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    tm utc{};
    gmtime_r(&now.tv_sec, &utc);
    char head[64];
    const size_t length = strftime(head, sizeof(head), "%Y-%m-%dT%H:%M:%S", &utc);
    std::string line(head, length);
    const std::string millis = std::to_string(now.tv_nsec / 1000000);
    line += "." + std::string(3 - millis.size(), '0') + millis + "Z " + names[static_cast<int>(level)] + " ";
    for (const char c : message) {
        line.push_back(static_cast<unsigned char>(c) < 32 ? ' ' : c);
    }
    line.push_back('\n');
    // One write per line, so that lines of several threads do not mix. A log that cannot be written is no failure.
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) {
        return;
    }
}

}  // namespace meshnet
