#include "worker/flags.h"

#include <functional>
#include <limits>
#include <vector>

namespace meshnet {
namespace {

// Reads one flag's value; false if it is not what it should be.
using Reader = std::function<bool(const std::string &)>;

struct Flag {
    const char * name;
    const char * value;  // how the value is written; null: the flag takes none
    const char * help;
    Reader read;
};

bool read_number(const std::string & text, uint64_t min, uint64_t max, uint64_t & number) {
    if (text.empty() || text.size() > 12 || text.find_first_not_of("0123456789") != std::string::npos) {
        return false;
    }
    number = std::stoull(text);
    return number >= min && number <= max;
}

template <typename Integer>
Reader number(Integer & target, uint64_t min, uint64_t max) {
    return [&target, min, max](const std::string & text) {
        uint64_t value = 0;
        if (!read_number(text, min, max, value)) {
            return false;
        }
        target = static_cast<Integer>(value);
        return true;
    };
}

Reader text(std::string & target) {
    return [&target](const std::string & value) {
        target = value;
        return !value.empty();
    };
}

Reader on(bool & target) {
    return [&target](const std::string &) { return target = true; };
}

bool read_layers(const std::string & value, LayerRange & layers) {
    if (value == "all") {
        layers = {0, 0};
        return true;
    }
    const size_t colon = value.find(':');
    uint64_t start = 0;
    uint64_t end = 0;
    if (colon == std::string::npos || !read_number(value.substr(0, colon), 0, 100'000, start) ||
        !read_number(value.substr(colon + 1), start + 1, 100'000, end)) {
        return false;
    }
    layers = {static_cast<int32_t>(start), static_cast<int32_t>(end)};
    return true;
}

std::vector<Flag> flag_table(Flags & f) {
    constexpr uint64_t day_ms = 86'400'000;
    auto & e = f.engine;
    auto & w = f.worker;
    return {
        {"--model", "PATH", "GGUF file (test engine: test:LAYERS[:US_PER_LAYER_TOKEN[:TENSORS]])", text(e.model_path)},
        {"--layers", "A:B|all", "layer range, end exclusive (default all)",
         [&e](const std::string & value) { return read_layers(value, e.layers); }},
        {"--listen", "HOST:PORT", "address to serve on; port 0 takes a free one (default 127.0.0.1:0)", text(f.listen)},
        {"--engine", "llama|test", "what computes (default llama)",
         [&f](const std::string & value) {
             f.engine_kind = value;
             return value == "llama" || value == "test";
         }},
        {"--threads", "N", "compute threads, at most 4096; 0 is all cores (default 0)", number(e.threads, 0, 4096)},
        {"--context", "TOKENS", "most tokens of one session, 1 to 131072 (default 4096)",
         number(e.session_tokens, 1, max_session_tokens)},
        {"--sessions", "N", "sessions at once, 1 to 4096 (default 4)", number(e.sequences, 1, 4096)},
        {"--step-tokens", "N", "most tokens of one step, 1 to 65536 (default 512)", number(e.step_tokens, 1, 65536)},
        {"--chunk-tokens", "N", "prefill chunk at the head, 1 to 65536 (default 64)", number(w.chunk_tokens, 1, 65536)},
        {"--parts", "N", "parts of the range loaded for sessions that use no more of it, 0 to 64 (default 2)",
         number(w.parts.max_parts, 0, 64)},
        {"--kv-type-k", "TYPE", "ggml type of cached keys (default f16)", text(e.kv_type_k)},
        {"--kv-type-v", "TYPE", "ggml type of cached values (default f16)", text(e.kv_type_v)},
        {"--artifact-digest", "S", "identity of the model artifact", text(w.artifact_digest)},
        {"--shard-id", "S", "name of this shard (default ENGINE-START-END)", text(w.shard_id)},
        {"--model-name", "S", "name of the model (default the file's)", text(w.model_name)},
        {"--idle-timeout-ms", "N", "close sessions without traffic (default 120000)",
         number(w.idle_timeout_ms, 1, day_ms)},
        {"--orphan-timeout-ms", "N", "close sessions whose gateway says nothing (default 10000)",
         number(w.orphan_timeout_ms, 1, day_ms)},
        {"--step-timeout-ms", "N", "report a hop that does not answer (default 30000)",
         number(w.step_timeout_ms, 1, day_ms)},
        {"--connect-timeout-ms", "N", "give up connecting to a neighbour (default 2000)",
         number(w.connect_timeout_ms, 1, day_ms)},
        {"--drain-timeout-s", "N", "time for open sessions to end after SIGTERM (default 30)",
         number(f.drain_timeout_s, 0, 86'400)},
        {"--needs", nullptr, "print which tensors outside its layers the range reads (metadata only) and exit",
         on(f.needs)},
        {"--describe", nullptr, "print the description as one JSON line and exit", on(f.describe)},
        {"--exit-with-parent", nullptr, "exit when standard input closes", on(f.exit_with_parent)},
        {"--help", nullptr, "print this", on(f.help)},
    };
}

}  // namespace

bool parse_flags(int argc, char ** argv, Flags & flags, std::string & problem) {
    const auto table = flag_table(flags);
    for (int i = 1; i < argc; ++i) {
        std::string name = argv[i];
        std::string value;
        const size_t equals = name.find('=');
        const bool inline_value = equals != std::string::npos;
        if (inline_value) {
            value = name.substr(equals + 1);
            name.resize(equals);
        }
        const Flag * flag = nullptr;
        for (const auto & candidate : table) {
            flag = candidate.name == name ? &candidate : flag;
        }
        if (flag == nullptr) {
            problem = "unknown flag '" + name + "'; see --help";
            return false;
        }
        if (flag->value != nullptr && !inline_value) {
            if (i + 1 == argc) {
                problem = name + " needs a value: " + flag->value;
                return false;
            }
            value = argv[++i];
        }
        if ((flag->value == nullptr && inline_value) || !flag->read(value)) {
            problem = name + " " + value + ": expected " + (flag->value == nullptr ? "no value" : flag->value) + ", " +
                      flag->help;
            return false;
        }
    }
    if (flags.help) {
        return true;
    }
    if (flags.engine.model_path.empty()) {
        problem = "--model is missing: say which GGUF file to load";
        return false;
    }
    return true;
}

std::string flags_help() {
    Flags defaults;
    std::string help = "meshnet-shard: serves a range of layers of one model\n";
    for (const auto & flag : flag_table(defaults)) {
        std::string left = std::string("  ") + flag.name + (flag.value == nullptr ? "" : std::string(" ") + flag.value);
        left.resize(std::max<size_t>(left.size() + 2, 28), ' ');
        help += left + flag.help + "\n";
    }
    return help + "MESHNET_WORKER_KEY (hex) in the environment: key that session tickets are checked with.\n";
}

}  // namespace meshnet
