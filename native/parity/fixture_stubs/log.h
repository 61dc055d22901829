// Stands in for the log of llama.cpp's `common` library. See common.h.
#pragma once

#include "ggml.h"

#define LOG_LEVEL_ERROR 1
#define LOG_LEVEL_DEBUG 5
#define LOG(...) (void)0
#define LOG_INF(...) (void)0
#define LOG_ERR(...) (void)0

struct common_log;
inline common_log * common_log_main() {
    return nullptr;
}
inline void common_log_flush(common_log *) {}
inline void common_log_set_verbosity_thold(int) {}
inline int common_log_get_verbosity(ggml_log_level) {
    return LOG_LEVEL_DEBUG;
}
