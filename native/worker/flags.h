// The command line of meshnet-shard.
#pragma once

#include <cstdint>
#include <string>

#include "engine/shard_engine.h"
#include "worker/worker.h"

namespace meshnet {

struct Flags {
    EngineConfig engine;
    WorkerOptions worker;
    std::string engine_kind = "llama";
    std::string listen = "127.0.0.1:0";
    int64_t drain_timeout_s = 30;
    bool describe = false;
    bool needs = false;
    bool exit_with_parent = false;
    bool help = false;
};

// False with a reason that names the flag and what it should be.
bool parse_flags(int argc, char ** argv, Flags & flags, std::string & problem);

// One line per flag.
std::string flags_help();

}  // namespace meshnet
