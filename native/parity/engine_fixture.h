// Base of tests of the llama engine itself, on tiny models: MESHNET_PARITY_MODELS names the directory with their files
// ARCHITECTURE.gguf. Run by tests/parity/test_engine.py, which makes the models.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>

#include "parity/route.h"

namespace meshnet::parity {

inline std::string model_path(const std::string & architecture) {
    const char * directory = std::getenv("MESHNET_PARITY_MODELS");
    if (directory == nullptr) {
        throw std::runtime_error("MESHNET_PARITY_MODELS is not set; run `pytest tests/parity/test_engine.py`");
    }
    return std::string(directory) + "/" + architecture + ".gguf";
}

inline EngineConfig tiny_config(const std::string & architecture) {
    EngineConfig config;
    config.model_path = model_path(architecture);
    config.threads = 1;
    config.sequences = 3;
    config.session_tokens = 1024;
    config.step_tokens = 512;
    return config;
}

inline std::string name_of(const testing::TestParamInfo<std::string> & info) {
    std::string name = info.param;
    name.erase(std::remove(name.begin(), name.end(), '-'), name.end());
    return name;
}

inline const EngineDescription & describe(const Route & route) {
    return route.engines().front()->describe();
}

// The model's legal cuts, thinned to at most n.
inline std::vector<uint32_t> some_cuts(const Route & whole, size_t n) {
    const std::vector<uint32_t> & legal = describe(whole).legal_cuts;
    std::vector<uint32_t> cuts;
    for (size_t i = 0; i < n && i < legal.size(); ++i) {
        cuts.push_back(legal[(2 * i + 1) * legal.size() / (2 * std::min(n, legal.size()))]);
    }
    return cuts;
}

#define ASSERT_OK(expression)                                                                                          \
    do {                                                                                                               \
        const ::meshnet::Status status_ = (expression);                                                                \
        ASSERT_TRUE(status_.ok()) << ::meshnet::code_name(status_.code) << ": " << status_.message;                    \
    } while (false)

}  // namespace meshnet::parity
