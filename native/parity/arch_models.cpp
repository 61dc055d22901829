// Tiny models of every architecture that upstream's own fixture can make, as GGUF files.
//
//   meshnet-arch-models list                                one line per architecture: NAME dense|moe supported|REASON
//   meshnet-arch-models make NAME dense|moe REPEAT SEED OUT
//
// REPEAT stacks the fixture's layers so many times: most of its models have two, and a middle shard needs more. Not
// every architecture can be stacked; then making it fails. Failures of ggml abort: run one model per process.
//
// The fixture is upstream's test program, compiled in here as it is: its functions are all static.
#include <cstdint>
#include <vector>

#define main upstream_main
#include "tests/test-llama-archs.cpp"
#undef main
#include "src/llama-model.h"

namespace {

size_t element_bytes(gguf_type type) {
    switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
        return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
        return 2;
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_FLOAT32:
        return 4;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
        return 8;
    default:
        throw std::runtime_error("metadata with one text per layer cannot be repeated");
    }
}

// Repeats the layers: their number, and every metadata array with one element per layer.
void stack_layers(gguf_context * gguf, const std::string & architecture, uint32_t repeat) {
    const std::string prefix = architecture + ".";
    const std::string n_layer_key = prefix + "block_count";
    const int64_t n_layer_id = gguf_find_key(gguf, n_layer_key.c_str());
    const uint32_t n_layer = n_layer_id < 0 ? 0 : gguf_get_val_u32(gguf, n_layer_id);
    std::vector<std::string> keys;
    for (int64_t i = 0; i < gguf_get_n_kv(gguf); ++i) {
        const std::string key = gguf_get_key(gguf, i);
        const bool per_layer = gguf_get_kv_type(gguf, i) == GGUF_TYPE_ARRAY && gguf_get_arr_n(gguf, i) == n_layer;
        if (per_layer && key.rfind(prefix, 0) == 0 && key.find(".rope.") == std::string::npos) {
            keys.push_back(key);
        }
    }
    for (const std::string & key : keys) {
        const int64_t i = gguf_find_key(gguf, key.c_str());
        const gguf_type type = gguf_get_arr_type(gguf, i);
        const size_t n = gguf_get_arr_n(gguf, i);
        const auto * data = static_cast<const char *>(gguf_get_arr_data(gguf, i));
        const std::string once(data, n * element_bytes(type));
        std::string repeated;
        for (uint32_t k = 0; k < repeat; ++k) {
            repeated += once;
        }
        gguf_set_arr_data(gguf, key.c_str(), type, repeated.data(), n * repeat);
    }
    gguf_set_val_u32(gguf, n_layer_key.c_str(), n_layer * repeat);
}

// Metadata that upstream's fixture lacks; false if it lacks none. With it, these architectures can be made too.
bool add_missing(gguf_context * gguf, llm_arch arch) {
    const std::string prefix = std::string(llm_arch_name(arch)) + ".";
    if (arch == LLM_ARCH_RWKV7 || arch == LLM_ARCH_ARWKV7) {
        for (const char * name : {"decay", "iclr", "value_residual_mix", "gate"}) {
            gguf_set_val_u32(gguf, (prefix + "attention." + name + "_lora_rank").c_str(), 32);
        }
        return true;
    }
    if (arch == LLM_ARCH_GEMMA4) {
        const std::vector<uint32_t> windowed = {1, 1, 1, 1, 0};
        gguf_set_arr_data(gguf, (prefix + "attention.sliding_window_pattern").c_str(), GGUF_TYPE_UINT32,
                          windowed.data(), windowed.size());
        return true;
    }
    return false;
}

// For what upstream's saver does not write, or not all of it: the metadata that the model was made of, and its tensors.
void save(const gguf_context * made_of, const llama_model * model, const char * path) {
    const gguf_context_ptr gguf(gguf_init_empty());
    gguf_set_kv(gguf.get(), made_of);
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        if (gguf_find_tensor(gguf.get(), tensor->name) < 0) {
            gguf_add_tensor(gguf.get(), tensor);
        }
    }
    if (!gguf_write_to_file(gguf.get(), path, false)) {
        throw std::runtime_error(std::string("cannot write ") + path);
    }
}

int list() {
    for (const llm_arch & arch : llm_arch_all()) {
        if (arch == LLM_ARCH_UNKNOWN) {
            continue;
        }
        const char * verdict = arch_supported(arch) ? "supported" : "upstream's fixture does not support it";
        for (const bool moe : {false, true}) {
            if (moe ? moe_implemented(arch) : !moe_mandatory(arch)) {
                printf("%s %s %s\n", llm_arch_name(arch), moe ? "moe" : "dense", verdict);
            }
        }
    }
    return 0;
}

int make(const std::string & name, bool moe, uint32_t repeat, size_t seed, const char * path) {
    const llm_arch arch = llm_arch_from_string(name);
    if (arch == LLM_ARCH_UNKNOWN || repeat == 0) {
        throw std::invalid_argument("no architecture " + name + ", or no layers");
    }
    gguf_context_ptr gguf = get_gguf_ctx(arch, moe);
    const bool completed = add_missing(gguf.get(), arch);
    if (repeat > 1) {
        stack_layers(gguf.get(), name, repeat);
    }
    const float stdev = 0.1F;  // as upstream's own runs
    const auto model_and_context = get_model_and_ctx(gguf.get(), nullptr, seed, stdev, {});
    if (llama_model_saver_supports_arch(arch) && !completed) {
        llama_model_save_to_file(model_and_context.first.get(), path);
    } else {
        save(gguf.get(), model_and_context.first.get(), path);
    }
    return 0;
}

}  // namespace

int main(int argc, char ** argv) {
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                fputs(text, stderr);
            }
        },
        nullptr);
    llama_backend_init();
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    try {
        if (arguments.size() == 1 && arguments[0] == "list") {
            return list();
        }
        if (arguments.size() == 6 && arguments[0] == "make" && (arguments[2] == "dense" || arguments[2] == "moe")) {
            return make(arguments[1], arguments[2] == "moe", static_cast<uint32_t>(std::stoul(arguments[3])),
                        std::stoull(arguments[4]), arguments[5].c_str());
        }
    } catch (const std::exception & error) {
        fprintf(stderr, "meshnet-arch-models: %s\n", error.what());
        return 1;
    }
    fprintf(stderr, "usage: meshnet-arch-models list | make NAME dense|moe REPEAT SEED OUT\n");
    return 2;
}
