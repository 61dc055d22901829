#pragma once

#include <string>

namespace meshnet {

enum class LogLevel { info, warning, error };

// One line on stderr: time, level, message. Safe from any thread.
void log_line(LogLevel level, const std::string & message);

inline void log_info(const std::string & message) {
    log_line(LogLevel::info, message);
}
inline void log_warning(const std::string & message) {
    log_line(LogLevel::warning, message);
}
inline void log_error(const std::string & message) {
    log_line(LogLevel::error, message);
}

}  // namespace meshnet
